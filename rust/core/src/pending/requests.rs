//! The requests and the lists that hold them, whatever peer they belong to.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::counters::RequestCounters;
use super::decided::Decided;
use super::peer::{Peer, Ready};
use super::rooms::Rooms;
use super::slots::{Ask, Link, List, Outcome, Slot, Slots, Stage};
use crate::ids::{RequestId, Room};
use crate::time::Tick;

/// A request that a poll takes.
#[derive(Debug)]
pub(super) struct Ended {
    pub seq: u64,
    pub id: RequestId,
    pub room: Room,
    pub outcome: Outcome,
}

/// All requests, with the lists over all peers.
#[derive(Debug)]
pub(super) struct Requests {
    pub slots: Slots,
    pub rooms: Rooms,
    /// Undecided ones in order of arrival.
    pub ages: List,
    pub deadlines: Deadlines,
    pub decided: Decided,
    pub counters: Box<RequestCounters>,
    /// What the scheduler's clock shows.
    pub lived: Tick,
    last_seq: u64,
}

/// Undecided requests of everybody by stage, in order of entry, which is the order of the stage's deadlines.
#[derive(Debug)]
pub(super) struct Deadlines {
    pub need_dp_rank: List,
    pub need_endpoints: List,
}

impl Requests {
    pub fn new() -> Self {
        Self {
            slots: Slots::default(),
            rooms: Rooms::default(),
            ages: List::EMPTY,
            deadlines: Deadlines { need_dp_rank: List::EMPTY, need_endpoints: List::EMPTY },
            decided: Decided::default(),
            counters: Box::default(),
            lived: Tick::ZERO,
            last_seq: 0,
        }
    }

    /// A request that is in no list yet.
    pub fn insert(&mut self, room: Room, preset: Option<u32>, added: Tick) -> RequestId {
        self.last_seq += 1;
        self.slots.insert(room, self.last_seq, added, preset)
    }

    /// How many were ever inserted.
    pub fn inserted(&self) -> u64 {
        self.last_seq
    }

    /// The one transition function of a request that has a peer: out of the lists of its stage, into those of the next.
    pub fn transition(&mut self, peer: &mut Peer, at: u32, next: Stage) {
        let old = core::mem::replace(&mut self.slots.at_mut(at).stage, Stage::Free);
        let step = Transition::between(&old, &next);
        if step == Transition::Arrives {
            self.slots.push_back(&mut self.ages, Link::Age, at);
            peer.pending += 1;
        } else {
            self.slots.unlink(peer_list(peer, &old), Link::Peer, at);
        }
        if step == Transition::Ends {
            self.slots.unlink(&mut self.ages, Link::Age, at);
            peer.pending -= 1;
            self.counters.on_end(&next, self.lived.since(self.slots.at(at).added));
        } else {
            self.slots.push_back(peer_list(peer, &next), Link::Peer, at);
        }
        if step != Transition::AsksAgain {
            if let Some(list) = self.deadlines.of(&old) {
                self.slots.unlink(list, Link::Stage, at);
            }
            if let Some(list) = self.deadlines.of(&next) {
                self.slots.push_back(list, Link::Stage, at);
            }
            let since = core::mem::replace(&mut self.slots.at_mut(at).stage_since, self.lived);
            self.counters.on_stay(&old, self.lived.since(since));
        }
        self.slots.at_mut(at).stage = next;
    }

    /// The request of `room` takes it and joins its peer, waiting for the topology.
    pub fn join(&mut self, peer: &mut Peer, peer_index: u32, at: u32) {
        let slot = self.slots.at_mut(at);
        slot.peer = peer_index;
        slot.owns_room = true;
        self.rooms.take(&self.slots, at);
        self.transition(peer, at, Stage::NeedInfo);
    }

    /// Move a request in `NeedDpRank` to another turn; its deadline stays.
    pub fn take_turn(&mut self, peer: &mut Peer, at: u32, ask: Ask, next_ask: Tick) {
        self.transition(peer, at, Stage::NeedDpRank(ask));
        self.slots.at_mut(at).next_ask = next_ask;
    }

    /// End an undecided request of `peer`; the next poll tells.
    pub fn decide(&mut self, peer: &mut Peer, at: u32, outcome: Outcome) {
        self.transition(peer, at, Stage::Decided(outcome));
        self.decided.push(self.slots.id(at));
    }

    /// End a request that is in no list.
    pub fn decide_unlinked(&mut self, at: u32, outcome: Outcome) {
        self.counters.on_outcome(&outcome);
        self.slots.at_mut(at).stage = Stage::Decided(outcome);
        self.decided.push(self.slots.id(at));
    }

    /// Take an undecided request out of everything, without an end.
    pub fn withdraw(&mut self, peer: &mut Peer, at: u32) {
        self.transition(peer, at, Stage::Free);
        self.release(at);
    }

    /// Take up to `limit` decided requests, in order of decision.
    pub fn take_decided(&mut self, limit: usize) -> Vec<Ended> {
        let most = limit.min(self.decided.len());
        let (mut ended, mut rooms) = (Vec::with_capacity(most), Vec::with_capacity(most));
        // Loops with little between one request and the next, so that the processor waits for the memory of several
        // at a time.
        while ended.len() < most
            && let Some(id) = self.decided.pop(&self.slots)
        {
            let &Slot { seq, room, owns_room, .. } = self.slots.at(id.slot);
            ended.push((seq, room, id));
            if owns_room {
                rooms.push((room, id.slot));
            }
        }
        let ended = ended.into_iter().map(|(seq, room, id)| {
            let Stage::Decided(outcome) = self.slots.release(id.slot) else {
                unreachable!("the queue holds only decided requests")
            };
            Ended { seq, id, room, outcome }
        });
        let ended = ended.collect();
        for (room, at) in rooms {
            self.rooms.give_back(room, at);
        }
        ended
    }

    /// A decided request was discarded.
    pub fn drop_decided(&mut self, at: u32) {
        self.release(at);
        self.decided.discarded(&self.slots);
    }

    /// The undecided requests of a peer in order of arrival.
    pub fn of_peer(&self, peer: &Peer) -> Vec<u32> {
        let mut all: Vec<u32> = self.slots.iter(&peer.need_info, Link::Peer).collect();
        if let Some(ready) = peer.ready() {
            let sent = [&ready.query.plain.rooms, &ready.query.waiting.rooms];
            for list in ready.query.unsent().chain(sent).chain(ready.groups.values().map(|g| &g.waiters)) {
                all.extend(self.slots.iter(list, Link::Peer));
            }
            all.sort_unstable_by_key(|&at| self.slots.at(at).seq);
        }
        all
    }

    fn release(&mut self, at: u32) -> Stage {
        let &Slot { owns_room, room, .. } = self.slots.at(at);
        if owns_room {
            self.rooms.give_back(room, at);
        }
        self.slots.release(at)
    }
}

impl Deadlines {
    /// The list of a stage's deadlines over all peers; the topology has none of its own.
    fn of(&mut self, stage: &Stage) -> Option<&mut List> {
        match stage {
            Stage::NeedDpRank(_) => Some(&mut self.need_dp_rank),
            Stage::NeedEndpoints(_) => Some(&mut self.need_endpoints),
            Stage::NeedInfo | Stage::Free | Stage::Decided(_) => None,
        }
    }
}

/// What a transition does to the lists over all peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transition {
    /// A new request begins to wait.
    Arrives,
    /// It waits for something else from now on.
    Goes,
    /// It waits for its dp rank as before, until the same deadline.
    AsksAgain,
    /// It waits no more.
    Ends,
}

impl Transition {
    /// The arrows of the diagram at [`Stage`], and no others.
    fn between(old: &Stage, next: &Stage) -> Self {
        match (old, next) {
            (Stage::Free, Stage::NeedInfo) => Self::Arrives,
            (Stage::NeedInfo, Stage::NeedInfo | Stage::NeedDpRank(_) | Stage::NeedEndpoints(_))
            | (Stage::NeedDpRank(_), Stage::NeedEndpoints(_) | Stage::NeedInfo)
            | (Stage::NeedEndpoints(_), Stage::NeedInfo) => Self::Goes,
            (Stage::NeedDpRank(_), Stage::NeedDpRank(_)) => Self::AsksAgain,
            (
                Stage::NeedInfo | Stage::NeedDpRank(_) | Stage::NeedEndpoints(_),
                Stage::Decided(_) | Stage::Free,
            ) => Self::Ends,
            (
                Stage::Free,
                Stage::NeedDpRank(_) | Stage::NeedEndpoints(_) | Stage::Decided(_) | Stage::Free,
            )
            | (Stage::NeedEndpoints(_), Stage::NeedDpRank(_) | Stage::NeedEndpoints(_))
            | (
                Stage::Decided(_),
                Stage::Free
                | Stage::NeedInfo
                | Stage::NeedDpRank(_)
                | Stage::NeedEndpoints(_)
                | Stage::Decided(_),
            ) => unreachable!("a request does not go from {old:?} to {next:?}"),
        }
    }
}

/// The list of `peer` that holds its requests in `stage`.
fn peer_list<'a>(peer: &'a mut Peer, stage: &Stage) -> &'a mut List {
    match stage {
        Stage::NeedInfo => &mut peer.need_info,
        Stage::NeedDpRank(ask) => late(peer).query.list_mut(*ask),
        Stage::NeedEndpoints(dp_rank) => match late(peer).groups.get_mut(dp_rank) {
            Some(group) => &mut group.waiters,
            None => unreachable!("a group is not removed while requests wait for it"),
        },
        Stage::Free | Stage::Decided(_) => unreachable!("only undecided requests are in a peer's lists"),
    }
}

fn late(peer: &mut Peer) -> &mut Ready {
    let Some(ready) = peer.ready_mut() else { unreachable!("late stages have only requests of ready peers") };
    ready
}
