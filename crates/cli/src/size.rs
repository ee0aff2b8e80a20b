//! Numbers of bytes with a unit.

/// Reads `4096`, `512MiB`, `2GiB` or `10MB`; a bare K, M, G or T is binary.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits_end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let number: u64 = digits
        .parse()
        .map_err(|_| "a whole number of bytes is needed, as 4096 or 512MiB".to_owned())?;
    let factor: u64 = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("{unit:?} is no unit; use KiB, MiB, GiB or TiB")),
    };
    number
        .checked_mul(factor)
        .ok_or_else(|| "too many bytes".to_owned())
}

/// A number of bytes for people, with three significant digits.
pub(crate) fn display_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut amount = bytes as f64;
    let mut unit = 0;
    while amount >= 1_000.0 && unit + 1 < UNITS.len() {
        amount /= 1_024.0;
        unit += 1;
    }
    let digits = match amount {
        _ if unit == 0 => 0,
        amount if amount < 10.0 => 2,
        amount if amount < 100.0 => 1,
        _ => 0,
    };
    format!("{amount:.digits$} {}", UNITS[unit])
}

/// A whole number for people: digits in groups of three.
pub(crate) fn display_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4_096),
            ("512MiB", 512 << 20),
            ("2GiB", 2 << 30),
            ("2g", 2 << 30),
            ("10 MB", 10_000_000),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1.5GiB", "3 apples", "99999999999TiB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_and_counts_are_written() {
        assert_eq!(display_size(0), "0 B");
        assert_eq!(display_size(999), "999 B");
        assert_eq!(display_size(1_536), "1.50 KiB");
        assert_eq!(display_size(300 << 20), "300 MiB");
        assert_eq!(display_count(0), "0");
        assert_eq!(display_count(999), "999");
        assert_eq!(display_count(1_234_567), "1,234,567");
    }
}
