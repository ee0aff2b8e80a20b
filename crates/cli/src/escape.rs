//! Bytes as text, and back.
//!
//! Printed as they are: every character of valid UTF-8 but control characters, the byte order mark and the backslash. Tab, line
//! feed, carriage return and backslash become `\t`, `\n`, `\r` and `\\`, every other byte `\xNN` with two
//! hexadecimal digits. Escaped text therefore has no raw tab and no raw line end, and reads back as
//! the same bytes.

/// The text form of bytes.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    let mut text = Vec::new();
    escape_into(bytes, &mut text);
    String::from_utf8(text).expect("escaped bytes are text")
}

/// Appends the text form of bytes.
pub(crate) fn escape_into(bytes: &[u8], text: &mut Vec<u8>) {
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\t' => text.extend_from_slice(b"\\t"),
                '\n' => text.extend_from_slice(b"\\n"),
                '\r' => text.extend_from_slice(b"\\r"),
                '\\' => text.extend_from_slice(b"\\\\"),
                _ => {
                    let mut buffer = [0; 4];
                    let encoded = character.encode_utf8(&mut buffer).as_bytes();
                    // The mark of UTF-8 text is none of a key's when it begins a file.
                    if character.is_control() || character == '\u{feff}' {
                        encoded.iter().for_each(|byte| escape_byte(*byte, text));
                    } else {
                        text.extend_from_slice(encoded);
                    }
                }
            }
        }
        chunk
            .invalid()
            .iter()
            .for_each(|byte| escape_byte(*byte, text));
    }
}

fn escape_byte(byte: u8, text: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let (high, low) = (usize::from(byte >> 4), usize::from(byte & 15));
    text.extend_from_slice(&[b'\\', b'x', DIGITS[high], DIGITS[low]]);
}

/// The bytes that escaped text stands for.
pub(crate) fn unescape(text: &[u8]) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(place) = rest.iter().position(|byte| *byte == b'\\') {
        bytes.extend_from_slice(&rest[..place]);
        rest = &rest[place + 1..];
        let (byte, used) = match rest {
            [b't', ..] => (b'\t', 1),
            [b'n', ..] => (b'\n', 1),
            [b'r', ..] => (b'\r', 1),
            [b'\\', ..] => (b'\\', 1),
            [b'x', high, low, ..] => match (hex_digit(*high), hex_digit(*low)) {
                (Some(high), Some(low)) => (high << 4 | low, 3),
                _ => return Err("\\x needs two hexadecimal digits".to_owned()),
            },
            [b'x', ..] => return Err("\\x needs two hexadecimal digits".to_owned()),
            [other, ..] => {
                let other = other.escape_ascii();
                return Err(format!("\\{other} is no escape; write a backslash as \\\\"));
            }
            [] => return Err("a backslash at the end; write it as \\\\".to_owned()),
        };
        bytes.push(byte);
        rest = &rest[used..];
    }
    bytes.extend_from_slice(rest);
    Ok(bytes)
}

/// The value of a hexadecimal digit.
pub(crate) fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_text_stays() {
        assert_eq!(escaped("Grüße, 世界 😀!".as_bytes()), "Grüße, 世界 😀!");
    }

    #[test]
    fn the_rest_is_escaped() {
        assert_eq!(escaped(b"a\tb\nc\rd\\e"), "a\\tb\\nc\\rd\\\\e");
        assert_eq!(escaped(b"\0\x1b\x7f\xff\xc3"), "\\x00\\x1b\\x7f\\xff\\xc3");
        assert_eq!(escaped("\u{85}".as_bytes()), "\\xc2\\x85");
    }

    #[test]
    fn all_bytes_read_back() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1_000).collect();
        for start in 0..300 {
            let bytes = &bytes[start..];
            assert_eq!(unescape(escaped(bytes).as_bytes()).unwrap(), bytes);
        }
        assert_eq!(unescape(b"\\xFF\\xfe"), Ok(vec![255, 254]));
    }

    #[test]
    fn broken_escapes_are_refused() {
        for text in ["\\", "a\\q", "\\x", "\\x1", "\\xg0", "\\x0 "] {
            assert!(unescape(text.as_bytes()).is_err(), "{text}");
        }
    }
}
