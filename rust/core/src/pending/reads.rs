//! Reads of a ready peer's topology: heartbeats, and the confirmation after look-ups.

use alloc::format;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::attempts::sentinel;
use super::peer::{Group, GroupState, Ready};
use super::route::{CommandKind, EventKind};
use super::{Flight, Machine, Purpose};
use crate::answer::Answer;
use crate::ids::Ticket;
use crate::retry::seconds;
use crate::time::Tick;
use crate::topology::PrefillInfo;

impl Machine {
    /// A read was answered.
    pub(super) fn on_read(
        &mut self,
        at: u32,
        ticket: Ticket,
        flight: Flight,
        answer: Answer,
        instance: Option<&str>,
    ) {
        match answer {
            Answer::Good(info) => self.read_succeeded(at, ticket, flight, *info, instance),
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
        instance: Option<&str>,
    ) {
        let peer = self.peers.at(at);
        let changed = peer.ready().is_none_or(|ready| *ready.info != info);
        if changed || self.is_other_instance(at, instance) {
            let dialect = peer.dialect;
            self.note_restarted(at);
            self.tell(EventKind::PeerRestarted, at, instance);
            self.reset(at);
            if !self.rests_after_restart(at) {
                self.peers.at_mut(at).dialect = dialect;
                self.become_ready(at, info, instance);
            }
            return;
        }
        let interval = seconds(self.options.heartbeat_interval_s);
        let peer = self.peers.at_mut(at);
        if peer.instance.is_none() {
            peer.instance = instance.map(Arc::from);
        }
        let Some(ready) = peer.ready_mut() else {
            return;
        };
        ready.read.missed = 0;
        ready.read.not_before = Tick::ZERO;
        ready.read.next_heartbeat = flight.started.after(interval);
        for dp_rank in ready.confirmed_by(ticket) {
            self.confirm_group(at, dp_rank);
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

    /// Whether `instance` says that the peer is not the one whose topology is cached.
    pub(super) fn is_other_instance(&self, at: u32, instance: Option<&str>) -> bool {
        match (&self.peers.at(at).instance, instance) {
            (Some(known), Some(now)) => **known != *now,
            (None, _) | (_, None) => false,
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
        let ticket = self.send(at, Purpose::Read, now, sentinel(kind, self.peers.at(at).dialect));
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

    /// The groups that were waiting for a read when this one was handed out.
    fn confirmed_by(&self, ticket: Ticket) -> Vec<u32> {
        let early = |group: &Group| matches!(group.state, GroupState::Reading { from } if from <= ticket);
        self.reading.iter().copied().filter(|dp| self.groups.get(dp).is_some_and(early)).collect()
    }
}
