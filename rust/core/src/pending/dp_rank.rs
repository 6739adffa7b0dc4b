//! Which dp rank holds a request: by rule where there is one, else asked for in batches.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Write;
use core::time::Duration;

use super::peer::{Peer, Query, Ready};
use super::route::CommandKind;
use super::slots::{Ask, Form, Link, List, Outcome, Slots, Stage};
use super::{Flight, HttpRequest, Machine, Purpose, failure, failure_with_status};
use crate::answer::Dialect;
use crate::failure::FailureKind;
use crate::ids::Room;
use crate::time::Tick;
use crate::wire;

impl Machine {
    /// Take a request of a ready peer as far as it goes without asking.
    pub(super) fn place(&mut self, at: u32, request: u32) {
        let now = self.now;
        let slot = self.requests.slots.at(request);
        let (room, preset) = (slot.room, slot.preset);
        let peer = self.peers.at(at);
        let Some(ready) = peer.ready() else { return };
        let size = ready.info.dp_size();
        if let Some(preset) = preset.filter(|&preset| preset >= size) {
            let text = format!("dp rank {preset} was preset, but its dp size is {size}");
            let failure =
                failure_with_status(FailureKind::DpRankOutOfRange, &peer.addr, &text, 0, PRESET_STATUS);
            return self.requests.decide(self.peers.at_mut(at), request, Outcome::Failed(failure));
        }
        if let Some(dp_rank) = self.dp_rank_without_asking(peer, ready, room, preset) {
            return self.need_endpoints(at, request, dp_rank);
        }
        let slot = self.requests.slots.at_mut(request);
        slot.next_ask = now;
        slot.asked = 0;
        self.requests.transition(self.peers.at_mut(at), request, Stage::NeedDpRank(Ask::Turn(0)));
    }

    /// The dp rank by the rules that need no query; a preset that is too large has none.
    pub(super) fn dp_rank_without_asking(
        &self,
        peer: &Peer,
        ready: &Ready,
        room: Room,
        preset: Option<u32>,
    ) -> Option<u32> {
        let size = ready.info.dp_size();
        if let Some(preset) = preset {
            return (preset < size).then_some(preset);
        }
        if size == 1 {
            return Some(0);
        }
        let follows =
            ready.info.follow_bootstrap_room() && !ready.info.dynamic_dp_size() && !self.options.force_query;
        if !follows && peer.dialect == Dialect::E3 {
            return None;
        }
        u32::try_from(room.number() % u64::from(size)).ok()
    }

    /// Send the query that is due, if none is in flight: a waiting one where the peer has it, and beside that one a plain
    /// one for rooms that came later.
    pub(super) fn pump_queries(&mut self, at: u32) {
        let now = self.now;
        let Some(ready) = self.peers.at(at).ready() else { return };
        let Some(due) = ready.query.due(&self.requests.slots) else { return };
        if due > now {
            return;
        }
        let query = &ready.query;
        let may_wait = ready.features.wait_query && !query.plainly && query.waiting.ticket.is_none();
        let waits = may_wait && self.waiting_queries < MOST_WAITING_QUERIES;
        self.send_query(at, if waits { Form::Waiting } else { Form::Plain });
    }

    fn send_query(&mut self, at: u32, form: Form) {
        let now = self.now;
        let (until, wait_ms) = match form {
            Form::Plain => (now, 0),
            Form::Waiting => (Tick::MAX, WAIT_MS),
        };
        let mut rooms: Vec<(u64, Room)> = Vec::new();
        while rooms.len() < QUERY_ROOMS {
            let peer = self.peers.at_mut(at);
            let Some(next) = peer.ready().and_then(|ready| ready.query.next(&self.requests.slots, until))
            else {
                break;
            };
            self.requests.take_turn(peer, next, Ask::Sent(form), now);
            let slot = self.requests.slots.at_mut(next);
            slot.asked += 1;
            rooms.push((slot.seq, slot.room));
        }
        rooms.sort_unstable();
        self.counters.rooms_asked += u64::from(crate::ids::number(rooms.len()));
        let ticket = self.send(at, Purpose::Query(form), now, query(&rooms, wait_ms));
        self.waiting_queries += u32::from(form == Form::Waiting);
        if let Some(ready) = self.peers.at_mut(at).ready_mut() {
            ready.query.sent_mut(form).ticket = Some(ticket);
            ready.query.not_before = now.after(QUERY_GAP);
        }
    }

    pub(super) fn on_dp_ranks(&mut self, at: u32, flight: Flight, form: Form, status: u16, body: &[u8]) {
        if status != 200 {
            if form == Form::Waiting
                && (400..500).contains(&status)
                && status != 429
                && let Some(ready) = self.peers.at_mut(at).ready_mut()
            {
                // What advertises the waiting and refuses it is asked plainly, in this life.
                ready.features.wait_query = false;
            }
            return self.query_failed(at, flight, form, format!("answered {status} to the dp-rank query"));
        }
        let ranks = match wire::parse_dp_ranks(body) {
            Ok(ranks) => ranks,
            Err(error) => return self.query_failed(at, flight, form, format!("protocol error: {error}")),
        };
        if let Some(ready) = self.peers.at_mut(at).ready_mut() {
            ready.query.plainly = false;
            if form == Form::Waiting {
                ready.query.waits_failed = 0;
            }
        }
        let mut unknown = Vec::new();
        // Answers are looked up by what was asked, so that what else the body says costs nothing.
        let asked = self.asked(at, form);
        let count = asked.len();
        for request in asked {
            let room = self.requests.slots.at(request).room;
            let found = ranks.binary_search_by_key(&room.number(), |&(room, _)| room).ok();
            match found.and_then(|found| ranks.get(found)) {
                Some(&(_, Ok(dp_rank))) => {
                    self.counters.rooms_resolved += 1;
                    self.on_dp_rank(at, request, dp_rank);
                }
                // A malformed entry is as good as none; the other rooms' are used.
                Some((_, Err(_))) | None => unknown.push(request),
            }
        }
        // A peer that waits as it was asked to may be asked again at once, or soon if that is much work; one that
        // answers early and knows nothing is paced as if it had been asked plainly.
        let waited = self.now.since(flight.started) >= Duration::from_millis(u64::from(WAIT_MS));
        let at_once = form == Form::Waiting && (waited || unknown.len() < count);
        for request in unknown {
            let asked = self.requests.slots.at(request).asked;
            let (ask, next_ask) = match at_once {
                true if count <= MANY_ROOMS => (Ask::Turn(0), self.now),
                true => (Ask::Left, flight.started.after(MANY_ROOMS_GAP)),
                false => (Query::turn_after(asked), flight.started.after(wait_after(asked))),
            };
            self.requests.take_turn(self.peers.at_mut(at), request, ask, next_ask);
        }
    }

    fn on_dp_rank(&mut self, at: u32, request: u32, dp_rank: u32) {
        let peer = self.peers.at(at);
        let size = peer.ready().map_or(0, |ready| ready.info.dp_size());
        if dp_rank < size {
            return self.need_endpoints(at, request, dp_rank);
        }
        let room = self.requests.slots.at(request).room;
        let text = format!("it says dp rank {dp_rank} for room {room}, but its dp size is {size}");
        let failure = failure(FailureKind::DpRankOutOfRange, &peer.addr, &text, 0);
        self.requests.decide(self.peers.at_mut(at), request, Outcome::Failed(failure));
    }

    /// A failed query spends no budget; it is paced, and the stage's deadline ends it.
    pub(super) fn query_failed(&mut self, at: u32, flight: Flight, form: Form, text: String) {
        let not_before = flight.started.after(self.interval().max(QUERY_GAP));
        for request in self.asked(at, form) {
            self.requests.take_turn(self.peers.at_mut(at), request, Ask::Failed, not_before);
        }
        if let Some(ready) = self.peers.at_mut(at).ready_mut() {
            let query = &mut ready.query;
            query.error = text;
            query.not_before = query.not_before.max(not_before);
            if form == Form::Waiting {
                query.plainly = true;
                query.waits_failed += 1;
                ready.features.wait_query &= query.waits_failed < MOST_WAITS_FAILED;
            }
        }
    }

    /// The requests in the query that was in flight, in order of arrival.
    fn asked(&self, at: u32, form: Form) -> Vec<u32> {
        let Some(ready) = self.peers.at(at).ready() else {
            return Vec::new();
        };
        let rooms = &ready.query.sent(form).rooms;
        let mut asked: Vec<u32> = self.requests.slots.iter(rooms, Link::Peer).collect();
        asked.sort_by_key(|&request| self.requests.slots.at(request).seq);
        asked
    }
}

impl Query {
    /// When the next query is due, if another one may be sent.
    pub(super) fn due(&self, slots: &Slots) -> Option<Tick> {
        if self.plain.ticket.is_some() {
            return None;
        }
        let heads = self.unsent().filter_map(List::first);
        heads.map(|at| slots.at(at).next_ask).min().map(|due| due.max(self.not_before))
    }

    /// The request whose turn it is.
    fn next(&self, slots: &Slots, now: Tick) -> Option<u32> {
        let heads = self.unsent().filter_map(List::first);
        let turn = |&at: &u32| (slots.at(at).next_ask, slots.at(at).seq);
        heads.min_by_key(turn).filter(|&at| slots.at(at).next_ask <= now)
    }
}

/// How long after it was asked for the n-th time a room is asked for again: 20 ms doubling to 1 s.
fn wait_after(asked: u32) -> Duration {
    QUERY_GAP.saturating_mul(1 << asked.saturating_sub(1).min(6)).min(LONGEST_WAIT)
}

fn query(rooms: &[(u64, Room)], wait_ms: u32) -> HttpRequest {
    let mut text = String::with_capacity(24 + 21 * rooms.len());
    text.push_str("{\"bootstrap_rooms\":[");
    for (place, (_, room)) in rooms.iter().enumerate() {
        let comma = if place == 0 { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{room}");
    }
    text.push(']');
    if wait_ms > 0 {
        let _ = write!(text, ",\"wait_ms\":{wait_ms}");
    }
    text.push('}');
    HttpRequest {
        kind: CommandKind::DpRanks,
        path: "/query_dp_ranks".to_string(),
        body: Some(text.into_bytes()),
        max_body: 1024 + 64 * rooms.len(),
        wait_ms,
    }
}

/// Most rooms of one query.
const QUERY_ROOMS: usize = 4096;
/// Two queries to one peer start at least this far apart.
const QUERY_GAP: Duration = Duration::from_millis(20);
/// How long a peer is asked to wait until it knows a room; the most that it may be asked for.
const WAIT_MS: u32 = 5000;
/// Over all peers, as each holds a place among the requests in flight for seconds.
const MOST_WAITING_QUERIES: u32 = 256;
/// In a row; a peer is asked plainly then, for the rest of its life.
const MOST_WAITS_FAILED: u8 = 2;
/// Each answer to a query of thousands may settle one of them; what is left is asked for every 100 ms then.
const MANY_ROOMS: usize = 256;
const MANY_ROOMS_GAP: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// The caller's own mistake, in contrast to what a peer says.
const PRESET_STATUS: u16 = 400;
