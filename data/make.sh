#!/usr/bin/env bash
# Makes data/unicode-characters.tsv from the UnicodeData.txt of Debian's package unicode-data.
#
#   sudo apt-get install unicode-data && data/make.sh [path of UnicodeData.txt]
set -euo pipefail

source_file="${1:-/usr/share/unicode/UnicodeData.txt}"
target_file="$(dirname "$0")/unicode-characters.tsv"

if [[ ! -r "$source_file" ]]; then
    echo "error: $source_file cannot be read; install the package unicode-data" >&2
    exit 1
fi

# Fields of UnicodeData.txt: 1 code point, 2 name, 3 category, 11 name in Unicode 1.0. Control
# characters have no name but "<control>": their old name is given in place of it. The first and last
# lines of unnamed ranges (CJK, Hangul, private use, surrogates) describe no character and are left out.
LC_ALL=C awk -F ';' '
    $2 ~ /^<.*, (First|Last)>$/ { next }
    {
        name = $2
        if (name == "<control>") name = ($11 == "" ? "CONTROL" : "CONTROL " $11)
        printf "%s%s\t%s; %s\n", substr("000000", 1, 6 - length($1)), $1, name, $3
    }' "$source_file" | LC_ALL=C sort > "$target_file"
printf 'notice\t%s\n' \
    "Modified: made from UnicodeData.txt of the Unicode Character Database by data/make.sh. Copyright (c) Unicode, Inc.; terms in data/LICENSE-UNICODE.txt" \
    >> "$target_file"

echo "$(wc -l < "$target_file") records in $target_file"
