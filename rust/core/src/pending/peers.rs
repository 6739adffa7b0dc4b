//! All addresses, by name and by the time at which each has to be looked at.

use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::time::Duration;

use hashbrown::HashMap;

use super::peer::Peer;
use super::peer_state::PeerState;
use super::slots::Slots;
use crate::ids::{index, number};
use crate::time::Tick;

/// The addresses that are known.
#[derive(Debug, Default)]
pub(super) struct Peers {
    peers: Vec<Option<Peer>>,
    free: Vec<u32>,
    names: HashMap<Arc<str>, u32>,
    /// What was written for a known name instead of it. A name may be forgotten before its spellings.
    spellings: HashMap<Box<str>, Arc<str>>,
    /// An entry counts only while its peer's `wake` says the same.
    wakes: BinaryHeap<Reverse<(Tick, u32)>>,
}

impl Peers {
    pub fn find(&self, addr: &str) -> Option<u32> {
        self.names.get(addr).copied()
    }

    /// The peer of an address that was written in another way before.
    pub fn find_spelled(&self, address: &str) -> Option<u32> {
        self.find(self.spellings.get(address)?)
    }

    /// Save the parsing the next time; who writes an address in ever new ways makes room for itself only.
    pub fn remember_spelling(&mut self, address: &str, at: u32) {
        if self.spellings.len() >= MAX_SPELLINGS {
            self.spellings.clear();
        }
        let addr = Arc::clone(&self.at(at).addr);
        self.spellings.insert(Box::from(address), addr);
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn insert(&mut self, peer: Peer) -> u32 {
        let name = Arc::clone(&peer.addr);
        let at = match self.free.pop() {
            Some(free) => {
                if let Some(place) = self.peers.get_mut(index(free)) {
                    *place = Some(peer);
                }
                free
            }
            None => {
                self.peers.push(Some(peer));
                number(self.peers.len() - 1)
            }
        };
        self.names.insert(name, at);
        at
    }

    pub fn remove(&mut self, at: u32) {
        if let Some(peer) = self.peers.get_mut(index(at)).and_then(Option::take) {
            self.names.remove(&peer.addr);
            self.free.push(at);
        }
        if self.names.is_empty() {
            *self = Self::default();
        }
    }

    pub fn at(&self, at: u32) -> &Peer {
        let Some(Some(peer)) = self.peers.get(index(at)) else {
            unreachable!("requests and flights name only peers that are known")
        };
        peer
    }

    pub fn at_mut(&mut self, at: u32) -> &mut Peer {
        let Some(Some(peer)) = self.peers.get_mut(index(at)) else {
            unreachable!("requests and flights name only peers that are known")
        };
        peer
    }

    pub fn get(&self, at: u32) -> Option<&Peer> {
        self.peers.get(index(at))?.as_ref()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Peer)> {
        (0..).zip(&self.peers).filter_map(|(at, peer)| Some((at, peer.as_ref()?)))
    }

    /// See to it that the peer is woken when something of it is due.
    pub fn rearm(&mut self, at: u32, slots: &Slots, ttl: Duration) {
        let Some(Some(peer)) = self.peers.get_mut(index(at)) else {
            return;
        };
        let due = due(peer, slots, ttl);
        // A wake that is too early is harmless: it looks again and re-arms.
        let earlier = due.is_some_and(|due| peer.wake.is_none_or(|wake| due < wake));
        if earlier && let Some(due) = due {
            peer.wake = Some(due);
            self.wakes.push(Reverse((due, at)));
            self.compact();
        }
    }

    /// The next peer to look at, if it is due.
    pub fn pop_due(&mut self, now: Tick) -> Option<u32> {
        while let Some(&Reverse((tick, at))) = self.wakes.peek() {
            if tick > now {
                return None;
            }
            self.wakes.pop();
            if let Some(Some(peer)) = self.peers.get_mut(index(at))
                && peer.wake == Some(tick)
            {
                peer.wake = None;
                return Some(at);
            }
        }
        None
    }

    /// When the next peer is due.
    pub fn next_wake(&mut self) -> Option<Tick> {
        while let Some(&Reverse((tick, at))) = self.wakes.peek() {
            if self.get(at).is_some_and(|peer| peer.wake == Some(tick)) {
                return Some(tick);
            }
            self.wakes.pop();
        }
        None
    }

    /// Entries that do not count any more must not pile up.
    fn compact(&mut self) {
        if self.wakes.len() > 4 * self.peers.len() + 64 {
            self.wakes = self.iter().filter_map(|(at, peer)| Some(Reverse((peer.wake?, at)))).collect();
        }
    }
}

fn due(peer: &Peer, slots: &Slots, ttl: Duration) -> Option<Tick> {
    let forget = (peer.pending == 0).then(|| peer.last_add.after(ttl));
    let own = match peer.state() {
        PeerState::Unknown | PeerState::Fetching => None,
        PeerState::Waiting { until, for_poll } => (!for_poll).then_some(*until),
        PeerState::Marked { until, .. } => peer.fetch.is_none().then_some(*until),
        PeerState::Ready(ready) => {
            let lookup = ready.waiting.first().map(|&(until, _)| until);
            [lookup, ready.query.due(slots), ready.read_due()].into_iter().flatten().min()
        }
    };
    [forget, own].into_iter().flatten().min()
}

/// Most spellings, which at 320 bytes each are under half a MiB.
const MAX_SPELLINGS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_are_bounded_and_lead_nowhere_once_the_name_is_forgotten() {
        let mut peers = Peers::default();
        let [at, other] = ["p:1", "q:1"].map(|name| peers.insert(Peer::new(Arc::from(name), Tick::ZERO)));
        for number in 0..3000 {
            let spelling = alloc::format!("P:{number:06}");
            peers.remember_spelling(&spelling, at);
            assert_eq!(peers.find_spelled(&spelling), Some(at));
            assert!(peers.spellings.len() <= MAX_SPELLINGS);
        }
        peers.remember_spelling("P:01", at);
        peers.remove(at);
        assert_eq!(peers.find_spelled("P:01"), None);
        peers.remove(other);
        assert!(peers.spellings.is_empty());
    }
}
