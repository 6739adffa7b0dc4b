//! The requests and the lists that hold them, whatever peer they belong to.

use alloc::vec::Vec;

use super::decided::Decided;
use super::peer::{Peer, PeerState};
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
    /// Those in `NeedDpRank` in order of entry.
    pub need_dp_rank: List,
    /// Those in `NeedEndpoints` in order of entry.
    pub need_endpoints: List,
    pub decided: Decided,
    last_seq: u64,
}

impl Requests {
    pub fn new() -> Self {
        Self {
            slots: Slots::default(),
            rooms: Rooms::default(),
            ages: List::EMPTY,
            need_dp_rank: List::EMPTY,
            need_endpoints: List::EMPTY,
            decided: Decided::default(),
            last_seq: 0,
        }
    }

    /// A request that is in no list yet.
    pub fn insert(&mut self, room: Room, preset: Option<u32>, added: Tick) -> RequestId {
        self.last_seq += 1;
        self.slots.insert(room, self.last_seq, added, preset)
    }

    /// The request of `room` takes it and joins its peer, waiting for the topology.
    pub fn join(&mut self, peer: &mut Peer, peer_index: u32, at: u32) {
        let slot = self.slots.at_mut(at);
        slot.peer = peer_index;
        slot.owns_room = true;
        self.rooms.take(&self.slots, at);
        self.slots.push_back(&mut self.ages, Link::Age, at);
        self.slots.push_back(&mut peer.need_info, Link::Peer, at);
        peer.pending += 1;
    }

    /// Move an undecided request of `peer` to another undecided stage.
    pub fn enter(&mut self, peer: &mut Peer, at: u32, stage: Stage) {
        self.leave(peer, at);
        match &stage {
            Stage::NeedInfo => {}
            Stage::NeedDpRank(_) => self.slots.push_back(&mut self.need_dp_rank, Link::Stage, at),
            Stage::NeedEndpoints(_) => self.slots.push_back(&mut self.need_endpoints, Link::Stage, at),
            Stage::Free | Stage::Decided(_) => unreachable!("`decide` and `release` do that"),
        }
        self.slots.push_back(peer_list(peer, &stage), Link::Peer, at);
        self.slots.at_mut(at).stage = stage;
    }

    /// Move a request in `NeedDpRank` to another turn; its deadline stays.
    pub fn take_turn(&mut self, peer: &mut Peer, at: u32, ask: Ask, next_ask: Tick) {
        let old = self.slots.at(at).stage.clone();
        self.slots.unlink(peer_list(peer, &old), Link::Peer, at);
        let stage = Stage::NeedDpRank(ask);
        self.slots.push_back(peer_list(peer, &stage), Link::Peer, at);
        let slot = self.slots.at_mut(at);
        slot.stage = stage;
        slot.next_ask = next_ask;
    }

    /// End an undecided request of `peer`; the next poll tells.
    pub fn decide(&mut self, peer: &mut Peer, at: u32, outcome: Outcome) {
        self.leave(peer, at);
        self.slots.unlink(&mut self.ages, Link::Age, at);
        peer.pending -= 1;
        self.decide_unlinked(at, outcome);
    }

    /// End a request that is in no list.
    pub fn decide_unlinked(&mut self, at: u32, outcome: Outcome) {
        self.slots.at_mut(at).stage = Stage::Decided(outcome);
        self.decided.push(self.slots.id(at));
    }

    /// Take an undecided request out of everything, without an end.
    pub fn withdraw(&mut self, peer: &mut Peer, at: u32) {
        self.leave(peer, at);
        self.slots.unlink(&mut self.ages, Link::Age, at);
        peer.pending -= 1;
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
            let turns = ready.query.waiting().map(|(_, list)| list);
            for list in turns.chain([&ready.query.asking]).chain(ready.groups.values().map(|g| &g.waiters)) {
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

    fn leave(&mut self, peer: &mut Peer, at: u32) {
        let stage = self.slots.at(at).stage.clone();
        match stage {
            Stage::NeedDpRank(_) => self.slots.unlink(&mut self.need_dp_rank, Link::Stage, at),
            Stage::NeedEndpoints(_) => self.slots.unlink(&mut self.need_endpoints, Link::Stage, at),
            Stage::NeedInfo | Stage::Free | Stage::Decided(_) => {}
        }
        self.slots.unlink(peer_list(peer, &stage), Link::Peer, at);
    }
}

/// The list of `peer` that holds its requests in `stage`.
fn peer_list<'a>(peer: &'a mut Peer, stage: &Stage) -> &'a mut List {
    match (stage, &mut peer.state) {
        (Stage::NeedInfo, _) => &mut peer.need_info,
        (Stage::NeedDpRank(ask), PeerState::Ready(ready)) => ready.query.list_mut(*ask),
        (Stage::NeedEndpoints(dp_rank), PeerState::Ready(ready)) => match ready.groups.get_mut(dp_rank) {
            Some(group) => &mut group.waiters,
            None => unreachable!("a group is not removed while requests wait for it"),
        },
        (
            Stage::NeedDpRank(_) | Stage::NeedEndpoints(_) | Stage::Free | Stage::Decided(_),
            PeerState::Unknown
            | PeerState::Fetching
            | PeerState::Waiting { .. }
            | PeerState::Marked { .. }
            | PeerState::Ready(_),
        ) => {
            unreachable!("only undecided requests are in a peer's lists, and late stages only of ready peers")
        }
    }
}
