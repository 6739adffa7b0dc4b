//! The settings of a machine and their defaults.

use core::fmt;

use crate::allow::HostList;

/// What a machine is made with; [`Options::DEFAULT`] is the home of the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Port of addresses that state none; None makes such addresses an error.
    pub default_port: Option<u16>,
    /// Seconds that a request may wait for its dp rank.
    pub dp_rank_timeout_s: f64,
    /// Seconds that a request may wait for endpoints.
    pub endpoint_timeout_s: f64,
    /// Seconds that a request may wait in all.
    pub request_timeout_s: f64,
    /// Seconds between two looks at a ready peer.
    pub heartbeat_interval_s: f64,
    /// Looks that must fail in a row before a peer is lost.
    pub heartbeat_failures: u32,
    /// Seconds that the failures must span at least before a peer is lost.
    pub heartbeat_min_down_s: f64,
    /// Seconds without a request after which an address is forgotten.
    pub peer_ttl_s: f64,
    /// Most addresses that are known at a time.
    pub max_addresses: u32,
    /// Most endpoint look-ups in flight at one peer.
    pub max_endpoint_lookups_per_peer: u32,
    /// Ask for the dp rank even where `room % dp_size` would do.
    pub force_query: bool,
    /// Remember the rooms of routed requests until they are released.
    pub track_rooms: bool,
    /// Whether 404 to the topology query means not ready.
    pub not_found_is_transient: bool,
    /// Seed of the jitter.
    pub seed: u64,
}

impl Options {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        default_port: Some(8998),
        dp_rank_timeout_s: 30.0,
        endpoint_timeout_s: 10.0,
        request_timeout_s: 120.0,
        heartbeat_interval_s: 5.0,
        heartbeat_failures: 2,
        heartbeat_min_down_s: 10.0,
        peer_ttl_s: 900.0,
        max_addresses: 4096,
        max_endpoint_lookups_per_peer: 8,
        force_query: false,
        track_rooms: false,
        not_found_is_transient: false,
        seed: 0,
    };

    /// Check the ranges of all fields.
    ///
    /// # Errors
    /// The first field that is out of its range.
    pub fn validated(self) -> Result<Self, OptionError> {
        let seconds = [
            ("dp_rank_timeout_s", self.dp_rank_timeout_s),
            ("endpoint_timeout_s", self.endpoint_timeout_s),
            ("request_timeout_s", self.request_timeout_s),
            ("heartbeat_interval_s", self.heartbeat_interval_s),
            ("peer_ttl_s", self.peer_ttl_s),
        ];
        let counts = [
            ("heartbeat_failures", self.heartbeat_failures),
            ("max_addresses", self.max_addresses),
            ("max_endpoint_lookups_per_peer", self.max_endpoint_lookups_per_peer),
        ];
        if let Some((field, value)) = seconds.into_iter().find(|(_, value)| !(1e-3..=1e6).contains(value)) {
            return Err(OptionError {
                field,
                value,
                rule: "must be a number of seconds from 0.001 to 1000000",
            });
        }
        if let Some((field, _)) = counts.into_iter().find(|(_, value)| *value == 0) {
            return Err(OptionError { field, value: 0.0, rule: "must be at least 1" });
        }
        if !(0.0..=1e6).contains(&self.heartbeat_min_down_s) {
            let (field, value) = ("heartbeat_min_down_s", self.heartbeat_min_down_s);
            return Err(OptionError { field, value, rule: "must be a number of seconds from 0 to 1000000" });
        }
        match self.default_port {
            Some(0) => {
                Err(OptionError { field: "default_port", value: 0.0, rule: "must be from 1 to 65535" })
            }
            Some(_) | None => Ok(self),
        }
    }
}

/// Where requests and answers may lead; None is everywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Hosts of bootstrap addresses.
    pub hosts: Option<HostList>,
    /// Hosts of endpoints in answers. Nothing is looked up here, so a name must be listed as a name.
    pub rank_hosts: Option<HostList>,
}

/// An option that cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionError {
    /// Which field.
    pub field: &'static str,
    /// Its value.
    pub value: f64,
    /// What it must be.
    pub rule: &'static str,
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.field, self.value, self.rule)
    }
}
