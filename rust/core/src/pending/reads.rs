//! Reads of a ready peer: heartbeats, the confirmation after look-ups, and one of the cached endpoints now and then.

use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;

use super::attempts::sentinel;
use super::endpoints::lookup;
use super::headers::{Headers, Identity};
use super::peer::{Group, GroupState, Ready};
use super::route::{CommandKind, Endpoint};
use super::{Flight, HttpRequest, Machine, Purpose};
use crate::answer::Answer;
use crate::ids::{Ticket, index, number};
use crate::retry::seconds;
use crate::time::Tick;
use crate::topology::PrefillInfo;
use crate::wire;

impl Machine {
    /// A read was answered.
    pub(super) fn on_read(
        &mut self,
        at: u32,
        ticket: Ticket,
        flight: Flight,
        answer: Answer,
        headers: Headers<'_>,
    ) {
        match answer {
            Answer::Good(info) => self.read_succeeded(at, ticket, flight, *info, headers),
            Answer::Transient { text, .. } | Answer::Permanent { text, .. } => {
                self.read_failed(at, flight, &text);
            }
            Answer::AskOlderForm => self.read_failed(at, flight, "answered 400 to the topology query"),
        }
    }

    fn read_succeeded(
        &mut self,
        at: u32,
        ticket: Ticket,
        flight: Flight,
        info: PrefillInfo,
        headers: Headers<'_>,
    ) {
        let peer = self.peers.at(at);
        let said = headers.or_of_topology(&info);
        let changed = peer.ready().is_none_or(|ready| !ready.info.is_same(&info));
        if changed || peer.identity.differs_from(said) {
            return self.replace(at, info, headers);
        }
        let interval = seconds(self.options.heartbeat_interval_s);
        let peer = self.peers.at_mut(at);
        peer.identity.learn(said);
        let Some(ready) = peer.ready_mut() else {
            return;
        };
        ready.read.missed = 0;
        ready.read.not_before = Tick::ZERO;
        ready.read.next_heartbeat = flight.started.after(interval);
        for dp_rank in ready.confirmed_by(ticket) {
            self.confirm_group(at, dp_rank);
        }
        if matches!(flight.purpose, Purpose::Read { heartbeat: true }) {
            self.check_an_endpoint(at);
        }
    }

    fn read_failed(&mut self, at: u32, flight: Flight, text: &str) {
        let (now, interval) = (self.now, self.interval());
        let Some(ready) = self.peers.at_mut(at).ready_mut() else {
            return;
        };
        ready.read.missed += 1;
        if ready.read.missed == 1 {
            ready.read.missed_since = flight.started;
        }
        let (missed, down) = (ready.read.missed, now.since(ready.read.missed_since));
        if missed >= self.options.heartbeat_failures && down >= seconds(self.options.heartbeat_min_down_s) {
            let down = down.as_secs_f64();
            return self.lose(at, &format!("lost: {missed} reads failed over {down:.1} s: {text}"));
        }
        ready.read.not_before = flight.started.after(interval);
        ready.read.next_heartbeat = flight.started.after(seconds(self.options.heartbeat_interval_s));
        for dp_rank in ready.reading.iter().copied().collect::<Vec<u32>>() {
            let Some(group) = ready.groups.get_mut(&dp_rank) else {
                continue;
            };
            group.last_error = text.to_string();
            if group.waiters.is_empty() {
                ready.remove_group(dp_rank);
            }
        }
    }

    /// Look up one cached endpoint again, another one each time: all that shows the restart of a peer that states
    /// neither instance nor epoch and has the same topology again.
    fn check_an_endpoint(&mut self, at: u32) {
        let peer = self.peers.at_mut(at);
        if peer.identity.is_stated() {
            return;
        }
        let dialect = peer.dialect;
        let Some(ready) = peer.ready_mut() else { return };
        let Some((dp_rank, contact)) = ready.next_check() else { return };
        let Some(rank) = ready.contacts.get(index(contact)) else { return };
        let request = HttpRequest { kind: CommandKind::Heartbeat, ..lookup(dialect, dp_rank, rank) };
        let ticket = self.send(at, Purpose::Check { dp_rank, contact }, self.now, request);
        if let Some(ready) = self.peers.at_mut(at).ready_mut() {
            ready.read.check = Some(ticket);
        }
    }

    /// A cached endpoint was looked up again. Only a clear answer counts: the reads tell whether the peer is there.
    pub(super) fn on_check(
        &mut self,
        at: u32,
        (dp_rank, contact): (u32, u32),
        status: u16,
        body: &[u8],
        headers: Headers<'_>,
    ) {
        let ready = self.peers.at(at).ready();
        let Some(known) = ready.and_then(|ready| ready.endpoint(dp_rank, contact)) else {
            return;
        };
        let moved = match status {
            404 => true,
            200 => {
                let found = wire::parse_endpoint(body);
                found.is_ok_and(|found| found.ip != known.ip || found.port != known.port)
            }
            _ => false,
        };
        if moved {
            self.restart(at, Identity::of(headers));
        }
    }

    /// Start the read that is due, if none is in flight.
    pub(super) fn pump_reads(&mut self, at: u32) {
        let now = self.now;
        let peer = self.peers.at(at);
        let Some(read) = peer.ready().filter(|ready| ready.read_due().is_some_and(|due| due <= now)) else {
            return;
        };
        let confirms = !read.reading.is_empty() && read.read.not_before <= now;
        let kind = if confirms { CommandKind::Topology } else { CommandKind::Heartbeat };
        let purpose = Purpose::Read { heartbeat: !confirms };
        let ticket = self.send(at, purpose, now, sentinel(kind, self.peers.at(at).dialect));
        if let Some(ready) = self.peers.at_mut(at).ready_mut() {
            ready.read.in_flight = Some(ticket);
        }
    }
}

impl Ready {
    /// When the topology is to be read next, if no read is in flight.
    pub(super) fn read_due(&self) -> Option<Tick> {
        if self.read.in_flight.is_some() {
            return None;
        }
        let confirm = (!self.reading.is_empty()).then_some(self.read.not_before);
        Some(confirm.map_or(self.read.next_heartbeat, |confirm| confirm.min(self.read.next_heartbeat)))
    }

    /// The cached endpoint whose turn it is to be looked up again, if none is being looked up.
    fn next_check(&mut self) -> Option<(u32, u32)> {
        let is_ready = |group: &Group| matches!(group.state, GroupState::Ready(_));
        let mut ready: Vec<u32> =
            self.groups.iter().filter(|(_, group)| is_ready(group)).map(|(&dp_rank, _)| dp_rank).collect();
        if ready.is_empty() || self.read.check.is_some() {
            return None;
        }
        ready.sort_unstable();
        let turn = index(self.read.checks);
        self.read.checks = self.read.checks.wrapping_add(1);
        // Another dp rank each time: a rank that restarts alone is rarer than an engine that does.
        let dp_rank = ready.get(turn % ready.len())?;
        Some((*dp_rank, number(turn / ready.len() % self.contacts.len())))
    }

    /// A cached endpoint.
    fn endpoint(&self, dp_rank: u32, contact: u32) -> Option<&Endpoint> {
        match &self.groups.get(&dp_rank)?.state {
            GroupState::Ready(route) => route.endpoints.get(index(contact)),
            GroupState::Looking | GroupState::Waiting { .. } | GroupState::Reading { .. } => None,
        }
    }

    /// The groups that were waiting for a read when this one was handed out.
    fn confirmed_by(&self, ticket: Ticket) -> Vec<u32> {
        let early = |group: &Group| matches!(group.state, GroupState::Reading { from } if from <= ticket);
        self.reading.iter().copied().filter(|dp| self.groups.get(dp).is_some_and(early)).collect()
    }
}
