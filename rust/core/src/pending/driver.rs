//! The network's side: facts come in, commands go out, timers fire.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::endpoints::Wanted;
use super::headers::{Headers, Identity};
use super::peer_state::PeerState;
use super::route::{CommandKind, Route};
use super::slots::Form;
use super::{Command, Machine, Purpose};
use crate::answer::{Answer, TransportError};
use crate::ids::{RouteId, Ticket};
use crate::retry::seconds;
use crate::time::Tick;

impl Machine {
    /// The next thing for the transport to do. Ask again until it is None, after everything that changes state.
    #[must_use]
    pub fn poll_command(&mut self) -> Option<Command> {
        while let Some(command) = self.commands.pop_front() {
            if command.kind == CommandKind::Cancel {
                return Some(command);
            }
            // One that was cancelled before it was taken has no flight any more.
            let Some(flight) = self.flights.get_mut(&command.ticket) else {
                continue;
            };
            flight.taken = true;
            self.counters.on_handed_out(command.kind);
            return Some(command);
        }
        self.rung = false;
        None
    }

    /// Whether the driver has something to do that it does not know of; true once for each occasion.
    #[must_use]
    pub fn take_bell(&mut self) -> bool {
        let due = self.next_due();
        let earlier = due.is_some_and(|due| self.announced.is_none_or(|announced| due < announced));
        if self.rung || (self.commands.is_empty() && !earlier) {
            return false;
        }
        self.rung = true;
        true
    }

    /// When to call [`Machine::on_timer`], at the latest; None is never. Ask again after everything else.
    #[must_use]
    pub fn poll_timer(&mut self) -> Option<Tick> {
        self.announced = self.next_due();
        self.rung = !self.commands.is_empty();
        self.announced
    }

    /// Whether the driver has something to do or to wait for: a command, an answer, or a timer that is due. Changes
    /// nothing, so that anybody may ask who watches the driver.
    #[must_use]
    pub fn has_work(&mut self, now: Tick) -> bool {
        let is_due = self.next_due().is_some_and(|due| due <= now);
        is_due || !self.commands.is_empty() || !self.flights.is_empty()
    }

    /// Fire what is due; harmless when nothing is.
    pub fn on_timer(&mut self, now: Tick) {
        self.advance_to(now);
        self.end_overdue();
        let mut due = Vec::new();
        while let Some(at) = self.peers.pop_due(self.now) {
            due.push(at);
        }
        for at in due {
            self.look_at_peer(at);
            self.rearm(at);
        }
    }

    /// An HTTP request was answered: its whole body, and the headers that concern the peer. A ticket that is not
    /// awaited any more is ignored.
    pub fn on_response(&mut self, now: Tick, ticket: Ticket, status: u16, body: &[u8], headers: Headers<'_>) {
        self.advance_to(now);
        self.completed = Vec::new();
        let Some(flight) = self.land(ticket) else {
            return;
        };
        let at = flight.peer;
        let headers = headers.within_limits();
        match flight.purpose {
            Purpose::Attempt | Purpose::Probe => {
                let answer = self.topology_answer(at, status, body);
                self.on_attempt(at, flight, answer, headers);
            }
            Purpose::Read { .. } => {
                let answer = self.topology_answer(at, status, body);
                self.on_read(at, ticket, flight, answer, headers);
            }
            Purpose::Query(_) | Purpose::Lookup { .. } | Purpose::Check { .. }
                if self.peers.at(at).identity.differs_from(headers) =>
            {
                self.restart(at, Identity::of(headers));
            }
            Purpose::Query(form) => self.on_dp_ranks(at, flight, form, status, body),
            Purpose::Lookup { dp_rank, wanted: Wanted::Table } => {
                self.on_table(at, flight, dp_rank, status, body, headers);
            }
            Purpose::Check { dp_rank, contact } => {
                self.on_check(at, (dp_rank, contact), status, body, headers);
            }
            Purpose::Lookup { dp_rank, wanted: Wanted::Contact(contact) } => {
                self.on_endpoint(at, flight, (dp_rank, contact), status, body);
            }
        }
        self.pump(at);
        self.rearm(at);
    }

    /// An HTTP request got no whole answer. A ticket that is not awaited any more is ignored.
    pub fn on_error(&mut self, now: Tick, ticket: Ticket, error: TransportError, message: &str) {
        self.advance_to(now);
        let Some(flight) = self.land(ticket) else {
            return;
        };
        let at = flight.peer;
        let text: String = message.chars().take(MAX_MESSAGE).collect();
        match flight.purpose {
            Purpose::Attempt | Purpose::Probe => {
                self.on_attempt(at, flight, Answer::of_error(error, text), Headers::default());
            }
            _ if error == TransportError::Forbidden => self.forbid(at, &text),
            Purpose::Read { .. } => {
                self.on_read(at, ticket, flight, Answer::of_error(error, text), Headers::default());
            }
            Purpose::Query(form) => self.query_failed(at, flight, form, text),
            // It would be so each time: the bound knows nothing of long names and of what else a topology holds.
            Purpose::Lookup { wanted: Wanted::Table, .. }
                if matches!(
                    error,
                    TransportError::Oversized | TransportError::Cut | TransportError::Encoding
                ) =>
            {
                self.give_up_table(at, text);
            }
            Purpose::Lookup { dp_rank, wanted } => self.lookup_failed(at, flight, dp_rank, wanted, text),
            Purpose::Check { .. } => {}
        }
        self.pump(at);
        self.rearm(at);
    }

    /// Routes that the latest [`Machine::on_response`] completed, so that what is made of them can be made before a poll
    /// gives them out. To be asked for at once, or not at all: the next answer forgets them.
    #[must_use]
    pub fn poll_completed(&mut self) -> Vec<Arc<Route>> {
        core::mem::take(&mut self.completed)
    }

    /// Routes to which no later request is led, so that what was made of them can go. Ends that were decided before may
    /// still come out of a poll with one.
    #[must_use]
    pub fn poll_retired(&mut self) -> Vec<RouteId> {
        core::mem::take(&mut self.retired)
    }

    /// Start whatever a ready peer is due for.
    pub(super) fn pump(&mut self, at: u32) {
        if self.peers.get(at).is_some_and(|peer| peer.ready().is_some()) {
            self.pump_queries(at);
            self.pump_lookups(at);
            self.pump_reads(at);
        }
    }

    /// See to it that the peer is woken when something of it is due.
    pub(super) fn rearm(&mut self, at: u32) {
        self.peers.rearm(at, &self.requests.slots, seconds(self.options.peer_ttl_s));
    }

    fn look_at_peer(&mut self, at: u32) {
        let now = self.now;
        let Some(peer) = self.peers.get(at) else {
            return;
        };
        match peer.state() {
            PeerState::Waiting { until, for_poll: false } if *until <= now => self.leave_waiting(at),
            PeerState::Marked { until, .. } if *until <= now && peer.fetch.is_none() => {
                self.start_probe(at);
            }
            PeerState::Ready(_) => self.retry_lookups(at),
            PeerState::Unknown
            | PeerState::Fetching
            | PeerState::Waiting { .. }
            | PeerState::Marked { .. } => {}
        }
        let peer = self.peers.at(at);
        if peer.pending == 0 && peer.last_add.after(seconds(self.options.peer_ttl_s)) <= now {
            self.forget(at);
        } else {
            self.pump(at);
        }
    }

    fn topology_answer(&self, at: u32, status: u16, body: &[u8]) -> Answer {
        Answer::of_response(status, body, self.peers.at(at).dialect, self.options.not_found_is_transient)
    }

    /// The flight of a ticket, taken off wherever it was noted.
    fn land(&mut self, ticket: Ticket) -> Option<super::Flight> {
        let flight = self.flights.remove(&ticket)?;
        let peer = self.peers.at_mut(flight.peer);
        if matches!(flight.purpose, Purpose::Attempt | Purpose::Probe) {
            peer.fetch = None;
        }
        let Some(ready) = peer.ready_mut() else {
            return Some(flight);
        };
        match flight.purpose {
            Purpose::Attempt | Purpose::Probe => {}
            Purpose::Read { .. } => ready.read.in_flight = None,
            Purpose::Check { .. } => ready.read.check = None,
            Purpose::Query(form) => {
                ready.query.sent_mut(form).ticket = None;
                self.waiting_queries -= u32::from(form == Form::Waiting);
            }
            Purpose::Lookup { dp_rank, .. } => ready.land(ticket, dp_rank),
        }
        Some(flight)
    }

    fn next_due(&mut self) -> Option<Tick> {
        [self.next_deadline(), self.peers.next_wake()].into_iter().flatten().min()
    }
}

const MAX_MESSAGE: usize = 512;
