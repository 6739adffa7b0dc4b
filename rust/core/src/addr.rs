//! Bootstrap addresses: one canonical spelling of each (DESIGN.md section 8).

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};

/// The warm-up convention of SGLang: transfers to this host are fake.
pub const FAKE_HOST: &str = "2.2.2.2";

/// What is wrong with a text that should be an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddrError {
    /// Nothing there.
    Empty,
    /// More characters than any address has.
    TooLong,
    /// A blank, a control or a non-ASCII character.
    Characters,
    /// A scheme in front.
    Url,
    /// A path, a query or a user.
    Path,
    /// `[` without `]`.
    Bracket,
    /// Something else than a port behind `]`.
    AfterBracket,
    /// Several colons without brackets.
    NeedsBrackets,
    /// No port and no default one.
    NoPort,
    /// Not a number from 1 to 65535.
    Port,
    /// Nothing before the port.
    NoHost,
    /// Numbers, but not four of 0 to 255 without leading zeros.
    Ipv4,
    /// Not an IPv6 address within the brackets.
    Ipv6,
    /// A zone id with other characters than letters, digits, `.`, `_` and `-`.
    Zone,
    /// Neither a name nor an address.
    Host,
}

impl fmt::Display for AddrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "address is empty",
            Self::TooLong => "address has over 320 characters",
            Self::Characters => "address has a blank, a control or a non-ASCII character",
            Self::Url => "address is a URL; give host:port",
            Self::Path => "address has a path or user part; give host:port",
            Self::Bracket => "address has an opening bracket that is not closed",
            Self::AfterBracket => "address has text between the bracket and the port",
            Self::NeedsBrackets => "IPv6 address needs brackets: [v6]:port",
            Self::NoPort => "address has no port and there is no default",
            Self::Port => "port is not a number from 1 to 65535",
            Self::NoHost => "address has no host",
            Self::Ipv4 => "host is not a dotted IPv4 address of four numbers from 0 to 255",
            Self::Ipv6 => "text in brackets is not an IPv6 address",
            Self::Zone => "zone id of the IPv6 address is malformed",
            Self::Host => "host is neither a name nor an IP address",
        })
    }
}

/// The canonical `host:port` or `[v6]:port` of `text`: names lower-cased, IPv6 compressed, nothing resolved.
///
/// # Errors
/// What is wrong with `text`.
pub fn canonical(text: &str, default_port: Option<u16>) -> Result<String, AddrError> {
    check_characters(text)?;
    let (host, port) = split(text)?;
    let port = match port {
        Some(digits) => parse_port(digits)?,
        None => default_port.ok_or(AddrError::NoPort)?,
    };
    match host.strip_prefix('[') {
        Some(inside) => Ok(format!("[{}]:{port}", canonical_ipv6(inside)?)),
        None => Ok(format!("{}:{port}", canonical_name(host)?)),
    }
}

/// The host of a canonical address.
#[must_use]
pub fn host_of(canonical: &str) -> &str {
    canonical.rsplit_once(':').map_or(canonical, |(host, _)| host)
}

fn check_characters(text: &str) -> Result<(), AddrError> {
    if text.is_empty() {
        Err(AddrError::Empty)
    } else if text.len() > MAX_LENGTH {
        Err(AddrError::TooLong)
    } else if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        Err(AddrError::Characters)
    } else if text.contains("://") {
        Err(AddrError::Url)
    } else if text.contains(['/', '?', '#', '@', '\\']) {
        Err(AddrError::Path)
    } else {
        Ok(())
    }
}

/// Host (an IPv6 one with its opening bracket only) and the digits of the port.
fn split(text: &str) -> Result<(&str, Option<&str>), AddrError> {
    if text.starts_with('[') {
        let (host, rest) = text.split_once(']').ok_or(AddrError::Bracket)?;
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(AddrError::AfterBracket),
        };
    }
    match text.split_once(':') {
        Some((_, port)) if port.contains(':') => Err(AddrError::NeedsBrackets),
        Some((host, port)) => Ok((host, Some(port))),
        None => Ok((text, None)),
    }
}

fn parse_port(digits: &str) -> Result<u16, AddrError> {
    // `u16::from_str` takes a plus sign.
    if digits.is_empty() || digits.len() > 5 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(AddrError::Port);
    }
    match digits.parse() {
        Ok(0) | Err(_) => Err(AddrError::Port),
        Ok(port) => Ok(port),
    }
}

fn canonical_ipv6(text: &str) -> Result<String, AddrError> {
    let (number, zone) = match text.split_once('%') {
        Some((number, zone)) => (number, Some(zone)),
        None => (text, None),
    };
    let good = |zone: &str| {
        (1..=32).contains(&zone.len())
            && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    if zone.is_some_and(|zone| !good(zone)) {
        return Err(AddrError::Zone);
    }
    let parsed: Ipv6Addr = number.parse().map_err(|_| AddrError::Ipv6)?;
    Ok(match zone {
        Some(zone) => format!("{parsed}%{zone}"),
        None => format!("{parsed}"),
    })
}

pub(crate) fn canonical_name(host: &str) -> Result<String, AddrError> {
    if host.is_empty() {
        return Err(AddrError::NoHost);
    }
    let lower = host.to_ascii_lowercase();
    let named = match lower.strip_suffix('.') {
        Some(absolute) if !absolute.is_empty() => absolute,
        _ => lower.as_str(),
    };
    let last = named.rsplit('.').next().unwrap_or(named);
    let hexadecimal =
        last.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    if hexadecimal || (!last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit())) {
        // Other number forms (127.1, 0x7f.1, 010.0.0.1) would be second spellings of an address.
        return match host.parse::<Ipv4Addr>() {
            Ok(_) => Ok(lower),
            Err(_) => Err(AddrError::Ipv4),
        };
    }
    if host.len() <= 253 && named.split('.').all(is_label) { Ok(lower) } else { Err(AddrError::Host) }
}

fn is_label(label: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let bytes = label.as_bytes();
    (1..=63).contains(&bytes.len())
        && bytes.first().copied().is_some_and(inner)
        && bytes.last().copied().is_some_and(inner)
        && bytes.iter().all(|&byte| inner(byte) || byte == b'-')
}

const MAX_LENGTH: usize = 320;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_address_are_one() {
        for (text, expected) in [
            ("10.0.0.7", "10.0.0.7:8998"),
            ("Prefill-1.Cluster.LOCAL:9000", "prefill-1.cluster.local:9000"),
            ("[0:0:0:0:0:0:0:1]:8998", "[::1]:8998"),
            ("[::1]", "[::1]:8998"),
            ("[FE80::1%eth0]:1", "[fe80::1%eth0]:1"),
            ("localhost:08998", "localhost:8998"),
        ] {
            assert_eq!(canonical(text, Some(8998)).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (text, expected) in [
            ("", AddrError::Empty),
            ("host:99999", AddrError::Port),
            ("host:+80", AddrError::Port),
            ("host:", AddrError::Port),
            ("::1:80", AddrError::NeedsBrackets),
            ("http://p:8998", AddrError::Url),
            ("p:8998/route", AddrError::Path),
            ("a b:1", AddrError::Characters),
            ("127.1:8998", AddrError::Ipv4),
            ("010.0.0.1:8998", AddrError::Ipv4),
            ("0x7f.0.0.1:1", AddrError::Ipv4),
            ("127.0.0.0x1:1", AddrError::Ipv4),
            ("[::1]80", AddrError::AfterBracket),
            ("[::1:80", AddrError::Bracket),
            (":80", AddrError::NoHost),
            ("-a:80", AddrError::Host),
            ("[fe80::1%]:80", AddrError::Zone),
        ] {
            let found = canonical(text, Some(8998));
            // "0x7f.0.0.1" ends in a decimal label, so it is an IPv4 spelling too.
            assert_eq!(found, Err(expected), "{text}");
        }
        assert_eq!(canonical("host", None), Err(AddrError::NoPort));
    }
}
