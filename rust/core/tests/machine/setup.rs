//! What a machine is made with, and what its peers are.

use disagg_core::pending::{Machine, Options};
use disagg_core::retry::RetryPolicy;
use disagg_core::time::Tick;
use disagg_core::topology::{DecodeRank, DecodeRankSpec, PrefillInfo};
use disagg_core::wire::{self, TopologyBody};
use proptest::prelude::*;
use proptest::sample::select;

/// One machine, drawn.
#[derive(Clone, Debug)]
pub struct Setup {
    pub policy: RetryPolicy,
    pub options: Options,
    /// What each peer is at first: an index of [`TOPOLOGIES`].
    pub topologies: [usize; PEERS],
}

impl Setup {
    pub fn machine(&self) -> Machine {
        let decode = DecodeRank::new(DecodeRankSpec::default()).unwrap();
        let policy = self.policy.validated().unwrap();
        Machine::new(decode, policy, self.options.validated().unwrap(), Tick::ZERO)
    }
}

/// One topology that a peer may have.
pub struct Topology {
    pub body: &'static str,
    pub dp_size: u32,
    /// How many ranks the decode rank of [`Setup::machine`] contacts: all of one dp rank, as it has no TP itself.
    pub contacts: usize,
    /// The room says the dp rank, unless it is asked for by option.
    pub follows: bool,
    pub fits: bool,
}

impl Topology {
    pub fn info(&self) -> PrefillInfo {
        match wire::parse_topology(self.body.as_bytes()) {
            Ok(TopologyBody::Info(info)) => *info,
            other => panic!("{other:?}"),
        }
    }
}

pub fn policy() -> impl Strategy<Value = RetryPolicy> {
    let gaps =
        (select(vec![0.5, 1.0]), select(vec![1.0, 2.0]), select(vec![1.5, 30.0]), select(vec![0.0, 0.3]));
    let waits = (1..4_u32, select(vec![15.0, 0.7]), select(vec![0.0, 5.0]), any::<bool>());
    (gaps, waits).prop_map(|((interval_s, multiplier, max_interval_s, jitter), waits)| {
        let (max_attempts, cooldown_s, min_wait_s, per_cycle) = waits;
        RetryPolicy {
            max_attempts,
            interval_s,
            multiplier,
            max_interval_s,
            jitter,
            cooldown_s,
            min_wait_s,
            per_cycle,
        }
    })
}

fn options() -> impl Strategy<Value = Options> {
    let switches = [any::<bool>(), any::<bool>(), any::<bool>()];
    let limits =
        (select(vec![2, 3, 4096]), select(vec![1, 2, 8]), select(vec![(1, 0.0), (2, 10.0), (2, 0.0)]));
    let timeouts = (select(vec![3.0, 30.0]), select(vec![2.0, 10.0]), select(vec![8.0, 8.0, 120.0]));
    (switches, limits, timeouts, select(vec![3.0, 900.0, 900.0]), any::<u64>()).prop_map(
        |([force_query, track_rooms, not_found_is_transient], limits, timeouts, peer_ttl_s, seed)| {
            let (max_addresses, max_endpoint_lookups_per_peer, down) = limits;
            let (dp_rank_timeout_s, endpoint_timeout_s, request_timeout_s) = timeouts;
            let (heartbeat_failures, heartbeat_min_down_s) = down;
            Options {
                dp_rank_timeout_s,
                endpoint_timeout_s,
                request_timeout_s,
                heartbeat_failures,
                heartbeat_min_down_s,
                peer_ttl_s,
                max_addresses,
                max_endpoint_lookups_per_peer,
                force_query,
                track_rooms,
                not_found_is_transient,
                seed,
                ..Options::DEFAULT
            }
        },
    )
}

pub fn setup() -> impl Strategy<Value = Setup> {
    let topologies = proptest::array::uniform4(select(vec![0, 0, 1, 2, 3, 4]));
    (policy(), options(), topologies).prop_map(|(policy, options, topologies)| Setup {
        policy,
        options,
        topologies,
    })
}

/// The peers, each in several spellings; the canonical one first. One is the beginning of another.
pub const SPELLINGS: [&[&str]; PEERS] = [
    &["10.0.0.1:8998", "10.0.0.1", "10.0.0.1:08998"],
    &["10.0.0.11:8998", "10.0.0.11"],
    &["prefill-3:9000", "PREFILL-3:9000", "Prefill-3:09000"],
    &["[::1]:8998", "[0:0:0:0:0:0:0:1]", "[::1]"],
];
pub const PEERS: usize = 4;

pub const TOPOLOGIES: [Topology; 8] = [
    Topology {
        body: r#"{"attn_tp_size":1,"dp_size":1}"#,
        dp_size: 1,
        contacts: 1,
        follows: true,
        fits: true,
    },
    Topology {
        body: r#"{"attn_tp_size":2,"dp_size":1}"#,
        dp_size: 1,
        contacts: 2,
        follows: true,
        fits: true,
    },
    Topology {
        body: r#"{"attn_tp_size":1,"dp_size":2}"#,
        dp_size: 2,
        contacts: 1,
        follows: true,
        fits: true,
    },
    Topology {
        body: r#"{"attn_tp_size":1,"dp_size":3,"follow_bootstrap_room":false}"#,
        dp_size: 3,
        contacts: 1,
        follows: false,
        fits: true,
    },
    Topology {
        body: r#"{"attn_tp_size":2,"dp_size":2,"pp_size":2,"follow_bootstrap_room":false}"#,
        dp_size: 2,
        contacts: 4,
        follows: false,
        fits: true,
    },
    Topology {
        body: r#"{"attn_tp_size":1,"dp_size":1,"page_size":32}"#,
        dp_size: 1,
        contacts: 1,
        follows: true,
        fits: false,
    },
    Topology {
        body: r#"{"attn_tp_size":1,"dp_size":2,"dynamic_dp_size":true}"#,
        dp_size: 2,
        contacts: 1,
        follows: false,
        fits: true,
    },
    Topology {
        body: r#"{"attn_tp_size":1,"dp_size":1,"kv_layout":"hnd"}"#,
        dp_size: 1,
        contacts: 1,
        follows: true,
        fits: true,
    },
];
