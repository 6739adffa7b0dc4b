//! Which hosts may be dialled: names, wildcards and networks (DESIGN.md section 8).
//!
//! Each half of a list binds what it speaks of. When it has names, a name must be one of them; when it has networks,
//! every IP address must be in one of them, also one that a listed name resolves to. So a name that is listed beside
//! networks cannot be led elsewhere by whoever answers for it, and a name that is not listed is looked up only where
//! no name is listed at all.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hashbrown::HashSet;

use crate::addr;

/// The hosts that may be dialled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostList {
    names: HashSet<String>,
    /// What follows `*.`.
    wildcards: HashSet<String>,
    networks: Vec<Network>,
}

/// What a list says of a host that nobody has looked up yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may be dialled; what a name resolves to is to be checked all the same.
    Allowed,
    /// No packet goes there.
    Refused,
    /// A name in a list of networks only: what it resolves to decides.
    AfterLookUp,
}

impl Verdict {
    /// The name that Python sees.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
            Self::AfterLookUp => "after_look_up",
        }
    }
}

impl HostList {
    /// A list of these entries: `name`, `*.name`, an IP address, or `address/prefix`.
    ///
    /// # Errors
    /// The first entry that is none of them, or that there is no entry.
    pub fn new(entries: &[String]) -> Result<Self, HostListError> {
        if entries.is_empty() {
            return Err(HostListError { entry: None, rule: HostRule::NoEntries });
        }
        let mut list = Self::default();
        for entry in entries {
            list.add(entry).map_err(|rule| HostListError { entry: Some(entry.clone()), rule })?;
        }
        Ok(list)
    }

    /// What to do with a host, an IPv6 one with or without brackets; anything that is no host is refused.
    #[must_use]
    pub fn verdict(&self, host: &str) -> Verdict {
        match Host::parse(host) {
            Some(Host::Ip(ip)) if self.has_ip(ip) => Verdict::Allowed,
            Some(Host::Name(name)) if self.has_name(&name) => Verdict::Allowed,
            Some(Host::Name(_)) if self.names.is_empty() && self.wildcards.is_empty() => Verdict::AfterLookUp,
            Some(Host::Ip(_) | Host::Name(_)) | None => Verdict::Refused,
        }
    }

    /// Whether an IP address that a name resolved to may be dialled.
    #[must_use]
    pub fn allows_resolved(&self, ip: &str) -> bool {
        match Host::parse(ip) {
            Some(Host::Ip(ip)) => self.networks.is_empty() || self.has_ip(ip),
            Some(Host::Name(_)) | None => false,
        }
    }

    fn add(&mut self, entry: &str) -> Result<(), HostRule> {
        if entry.is_empty() {
            return Err(HostRule::Empty);
        }
        if entry == "*" {
            return Err(HostRule::Everything);
        }
        if let Some(suffix) = entry.strip_prefix("*.") {
            let Some(Host::Name(suffix)) = plain(suffix) else { return Err(HostRule::Wildcard) };
            self.wildcards.insert(suffix);
        } else if entry.contains('*') {
            return Err(HostRule::Wildcard);
        } else if let Some((ip, prefix)) = entry.split_once('/') {
            self.networks.push(Network::parse(ip, prefix)?);
        } else {
            match plain(entry) {
                Some(Host::Ip(ip)) => self.networks.push(Network::of_one(ip)),
                Some(Host::Name(name)) => drop(self.names.insert(name)),
                None if entry.contains('%') => return Err(HostRule::Zone),
                None if entry.contains(':') => return Err(HostRule::Port),
                None => return Err(HostRule::NoHost),
            }
        }
        Ok(())
    }

    fn has_ip(&self, ip: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(ip))
    }

    fn has_name(&self, name: &str) -> bool {
        let mut rest = name;
        while let Some((_, parent)) = rest.split_once('.') {
            if self.wildcards.contains(parent) {
                return true;
            }
            rest = parent;
        }
        self.names.contains(name)
    }
}

/// A host in the one form in which it is compared.
enum Host {
    Ip(IpAddr),
    /// Lower-cased, without the final dot.
    Name(String),
}

impl Host {
    fn parse(text: &str) -> Option<Self> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        // A zone says by which interface, not where to.
        let number = bare.split_once('%').map_or(bare, |(number, _)| number);
        if let Ok(v6) = number.parse::<Ipv6Addr>() {
            return Some(Self::Ip(v6.to_canonical()));
        }
        if let Ok(v4) = text.parse::<Ipv4Addr>() {
            return Some(Self::Ip(IpAddr::V4(v4)));
        }
        let name = addr::canonical_name(text).ok()?;
        Some(Self::Name(name.strip_suffix('.').map_or_else(|| name.clone(), ToString::to_string)))
    }
}

/// A host as an entry may have it: without a zone.
fn plain(text: &str) -> Option<Host> {
    if text.contains('%') { None } else { Host::parse(text) }
}

/// All IP addresses that begin alike. IPv4-mapped IPv6 is IPv4, so no IPv6 network holds an IPv4 address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Network {
    is_v4: bool,
    first: u128,
    free_bits: u32,
}

impl Network {
    fn of_one(ip: IpAddr) -> Self {
        let (is_v4, first) = number(ip);
        Self { is_v4, first, free_bits: 0 }
    }

    fn parse(ip: &str, prefix: &str) -> Result<Self, HostRule> {
        let (width, ip) = match (ip.parse::<Ipv4Addr>(), ip.parse::<Ipv6Addr>()) {
            (Ok(v4), _) => (32_u32, IpAddr::V4(v4)),
            (_, Ok(v6)) => (128, IpAddr::V6(v6)),
            (Err(_), Err(_)) if ip.contains('%') => return Err(HostRule::Zone),
            (Err(_), Err(_)) => return Err(HostRule::NoHost),
        };
        let is_number = (1..=3).contains(&prefix.len()) && prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix: Option<u32> = if is_number { prefix.parse().ok() } else { None };
        let free_bits = prefix.and_then(|prefix| width.checked_sub(prefix)).ok_or(HostRule::Prefix)?;
        let (_, first) = number(ip);
        // A shift by all 128 bits leaves nothing.
        let kept = first.checked_shr(free_bits).and_then(|high| high.checked_shl(free_bits)).unwrap_or(0);
        if kept != first {
            return Err(HostRule::HostBits);
        }
        // At least the 96 bits that say so are kept of an IPv4-mapped one.
        Ok(Self { free_bits, ..Self::of_one(ip.to_canonical()) })
    }

    fn contains(&self, ip: IpAddr) -> bool {
        let (is_v4, bits) = number(ip);
        is_v4 == self.is_v4 && (bits ^ self.first).checked_shr(self.free_bits).unwrap_or(0) == 0
    }
}

fn number(ip: IpAddr) -> (bool, u128) {
    match ip {
        IpAddr::V4(v4) => (true, u128::from(u32::from(v4))),
        IpAddr::V6(v6) => (false, u128::from(v6)),
    }
}

/// An entry that is no rule for hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostListError {
    /// The entry; None when there is none.
    pub entry: Option<String>,
    /// What it breaks.
    pub rule: HostRule,
}

/// What an entry must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRule {
    /// There are no entries.
    NoEntries,
    /// An entry without text.
    Empty,
    /// `*`.
    Everything,
    /// A `*` elsewhere than in front of a name.
    Wildcard,
    /// A prefix length that is no number, or over the address's.
    Prefix,
    /// `10.0.0.1/8`.
    HostBits,
    /// `fe80::1%eth0`.
    Zone,
    /// `host:port`.
    Port,
    /// Nothing that a host could be.
    NoHost,
}

impl fmt::Display for HostListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.entry {
            Some(entry) => write!(f, "entry {entry:?} {}", self.rule),
            None => write!(f, "{}", self.rule),
        }
    }
}

impl fmt::Display for HostRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoEntries => "is empty; leave it out to allow every host",
            Self::Empty => "is empty",
            Self::Everything => "would allow every name; leave the option out to allow every host",
            Self::Wildcard => "must have its only * in front of a name, as *.prefill.svc",
            Self::Prefix => "must have a prefix length from 0 to 32, for IPv6 to 128",
            Self::HostBits => "has bits set behind its prefix",
            Self::Zone => "must have no zone; hosts are compared without theirs",
            Self::Port => "must have no port; all ports of a host are allowed",
            Self::NoHost => "must be a name, *.name, an IP address or address/prefix",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Result<HostList, HostListError> {
        HostList::new(&entries.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn each_half_of_a_list_binds_what_it_speaks_of() {
        use Verdict::{AfterLookUp, Allowed, Refused};
        let mixed: &[&str] = &["p1", "*.Prefill.svc.", "10.0.0.0/8", "fd00::/8"];
        for (entries, host, expected) in [
            (mixed, "P1", Allowed),
            (mixed, "p1.", Allowed),
            (mixed, "a.prefill.svc", Allowed),
            (mixed, "a.b.prefill.svc", Allowed),
            (mixed, "prefill.svc", Refused),
            (mixed, "aprefill.svc", Refused),
            (mixed, "a.prefill.svc.evil.example", Refused),
            (mixed, "p1.evil.example", Refused),
            (mixed, "p11", Refused),
            (mixed, "10.255.0.1", Allowed),
            (mixed, "11.0.0.1", Refused),
            (mixed, "[::ffff:10.0.0.1]", Allowed),
            (mixed, "::ffff:a00:1", Allowed),
            (mixed, "[fd00::1%eth0]", Allowed),
            (mixed, "[fe00::1]", Refused),
            (mixed, "0x0a.0.0.1", Refused),
            (mixed, "010.0.0.1", Refused),
            (&["10.0.0.1"], "p1", AfterLookUp),
            (&["10.0.0.1"], "10.0.0.1", Allowed),
            (&["10.0.0.1"], "10.0.0.10", Refused),
            (&["p1"], "10.0.0.1", Refused),
            (&["::/0"], "10.0.0.1", Refused),
            (&["::/0"], "[::ffff:10.0.0.1]", Refused),
            (&["::ffff:10.0.0.0/104"], "10.9.9.9", Allowed),
            (&["0.0.0.0/0"], "255.255.255.255", Allowed),
            (&["0.0.0.0/0"], "[::1]", Refused),
        ] {
            assert_eq!(list(entries).unwrap().verdict(host), expected, "{entries:?} {host}");
        }
    }

    #[test]
    fn what_a_name_resolves_to_must_be_in_a_network_where_there_is_one() {
        let names = list(&["p1"]).unwrap();
        assert!(names.allows_resolved("169.254.169.254"));
        assert!(!names.allows_resolved("p1"), "no IP address");
        let mixed = list(&["p1", "10.0.0.0/8"]).unwrap();
        assert!(mixed.allows_resolved("10.1.2.3"));
        assert!(mixed.allows_resolved("::ffff:10.1.2.3"));
        assert!(!mixed.allows_resolved("169.254.169.254"));
        assert!(!mixed.allows_resolved("fe80::1%eth0"));
    }

    #[test]
    fn an_entry_that_is_no_rule_says_why() {
        for (entry, expected) in [
            ("", HostRule::Empty),
            ("*", HostRule::Everything),
            ("*.", HostRule::Wildcard),
            ("p*.svc", HostRule::Wildcard),
            ("*.*.svc", HostRule::Wildcard),
            ("*.10.0.0.1", HostRule::Wildcard),
            ("*.0.0.1", HostRule::Wildcard),
            ("10.0.0.0/33", HostRule::Prefix),
            ("10.0.0.0/", HostRule::Prefix),
            ("10.0.0.0/+8", HostRule::Prefix),
            ("fd00::/129", HostRule::Prefix),
            ("10.0.0.1/8", HostRule::HostBits),
            ("::ffff:10.0.0.0/95", HostRule::HostBits),
            ("fd00::1/0", HostRule::HostBits),
            ("fe80::1%eth0", HostRule::Zone),
            ("fe80::%1/10", HostRule::Zone),
            ("10.0.0.1:8998", HostRule::Port),
            ("p1:8998", HostRule::Port),
            ("http://p1", HostRule::NoHost),
            ("127.1", HostRule::NoHost),
            ("a b", HostRule::NoHost),
            ("p/8", HostRule::NoHost),
        ] {
            let found = list(&[entry]).unwrap_err();
            assert_eq!((found.entry.as_deref(), found.rule), (Some(entry), expected));
        }
        assert_eq!(list(&[]).unwrap_err().to_string(), "is empty; leave it out to allow every host");
        assert_eq!(
            list(&["p1", "10.0.0.1/8"]).unwrap_err().to_string(),
            "entry \"10.0.0.1/8\" has bits set behind its prefix"
        );
    }
}
