//! Sans-I/O core of disagg: where a decode rank's requests go, and what has to be asked of whom.
//!
//! # Theory of operation
//!
//! Nothing here reads a clock, a socket or a random number; the crate is `no_std`, so it could not. Time comes in as
//! a [`time::Tick`], work goes out as [`pending::Command`]s, and what came of it comes back as facts. The same
//! [`pending::Machine`] therefore runs under a real network, and in virtual time in tests.
//!
//! ```text
//!   scheduler thread                       network thread
//!   add, poll, discard                     on_response, on_error, on_timer
//!         │                                      │          ▲
//!         ▼                                      ▼          │ poll_command, poll_timer
//!   ┌───────────────────────────── Machine ──────────────────────────────┐
//!   │ requests by stage: NeedInfo → NeedDpRank → NeedEndpoints → Decided │
//!   │ peers by state: Unknown, Fetching, Waiting, Ready, Marked          │
//!   └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! - [`rank_mapping`] and [`compat`] say which prefill ranks a decode rank reads, or why the two do not fit.
//! - [`wire`] reads the bodies that peers send, [`topology`] holds what they mean.
//! - [`allow`] says which hosts may be dialled.
//! - [`pending`] is the machine: stages of requests, states of peers, retries, deadlines.
//! - [`pending::Counters`] and [`pending::Change`] are what whoever keeps metrics and a log takes from it.
//! - [`registry`] is the other side: the tables of a bootstrap server.
//!
//! The states of a peer and of a request are enums with a diagram each, and each is changed by one function that knows the
//! arrows (`pending/peer_state.rs`, `pending/requests.rs`); a group of endpoints has a third, small one
//! (`pending/peer.rs`). A decision depends on facts and calls, their times and their order, and not on the seed of a
//! hash table: ranks that hear the same say the same, in steps of the same number.
//!
//! Requests are never walked over. Each is in lists by what it waits for, deadlines of one length are lists in order
//! of entry, and each peer is woken by one heap; so an idle poll costs the same whatever waits.
//!
//! # How to drive it
//!
//! <div class="warning">
//!
//! After every call that takes a fact or a request in (`add`, `on_*`, `poll`, `fail_room`, ...), the network side
//! takes commands with `poll_command` until it is `None`, and then asks `poll_timer` when to call `on_timer`.
//! A network side that sleeps meanwhile has to be woken when `take_bell` says so.
//!
//! </div>
//!
//! What breaks otherwise: commands that are not taken are not sent, and a deadline that `poll_timer` was not asked for
//! passes late. What is harmless: `on_timer` when nothing is due, a fact whose ticket is not awaited (any more), a
//! fact that comes twice. Time that goes back is taken for time that stands still.
//!
//! ```
//! use core::time::Duration;
//! use disagg_core::ids::Room;
//! use disagg_core::pending::{Added, CommandKind, Headers, Machine, Options, Outcome};
//! use disagg_core::retry::RetryPolicy;
//! use disagg_core::time::Tick;
//! use disagg_core::topology::{DecodeRank, DecodeRankSpec};
//!
//! let spec = DecodeRankSpec { attn_tp_size: 2, engine_rank: 1, ..DecodeRankSpec::default() };
//! let decode = DecodeRank::new(spec).unwrap();
//! let mut now = Tick::ZERO;
//! let mut machine = Machine::new(decode, RetryPolicy::DEFAULT, Options::DEFAULT, now);
//!
//! // The scheduler: nothing is known of the peer, so the request waits.
//! let room = Room::new(7).unwrap();
//! assert!(matches!(machine.add(now, "10.0.0.7", room, None), Ok(Added::Pending(_))));
//!
//! // The network: commands until there are none, each answered a millisecond later.
//! while let Some(command) = machine.poll_command() {
//!     now = now.after(Duration::from_millis(1));
//!     let body: &[u8] = match command.kind {
//!         CommandKind::Topology | CommandKind::Heartbeat => br#"{"attn_tp_size": 1, "dp_size": 1}"#,
//!         CommandKind::Endpoint => br#"{"rank_ip": "10.0.0.8", "rank_port": 41000}"#,
//!         CommandKind::DpRanks | CommandKind::Cancel => continue,
//!     };
//!     machine.on_response(now, command.ticket, 200, body, Headers::default());
//! }
//! assert!(machine.poll_timer().is_some(), "the next heartbeat");
//!
//! // The scheduler, in its next cycle.
//! let step = machine.poll(now, 4096);
//! let [(_, Outcome::Routed(route))] = step.ended.as_slice() else { panic!("{step:?}") };
//! assert_eq!((&*route.addr, route.dp_rank, route.endpoints[0].port), ("10.0.0.7:8998", 0, 41000));
//!
//! // From now on the peer is a look-up.
//! assert!(matches!(machine.add(now, "10.0.0.7", Room::new(8).unwrap(), None), Ok(Added::Routed(_))));
//! ```
#![no_std]
#![warn(clippy::alloc_instead_of_core, clippy::std_instead_of_alloc)]

extern crate alloc;

pub mod addr;
pub mod allow;
mod answer;
pub mod compat;
pub mod error;
pub mod failure;
pub mod ids;
pub mod pending;
mod printable;
pub mod rank_mapping;
pub mod registry;
pub mod retry;
pub mod slot_table;
pub mod time;
pub mod topology;
pub mod wire;

pub use answer::{Dialect, TransportError};
