//! The requests whose end waits for a poll.

use alloc::collections::VecDeque;

use super::slots::Slots;
use crate::ids::RequestId;

/// Decided requests in order of decision.
///
/// A queue beside the slots, not a list linked through them as all others: a poll reads thousands of slots, and what
/// it reads next must not stand in the one that the processor still waits for (a poll of 4,096 scattered slots took
/// 1.3 ms with a list and takes 0.8). What is discarded meanwhile stays until it is met or piles up.
#[derive(Debug, Default)]
pub(super) struct Decided {
    queue: VecDeque<RequestId>,
    len: usize,
}

impl Decided {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn push(&mut self, id: RequestId) {
        self.queue.push_back(id);
        self.len += 1;
    }

    /// The next one, which the caller releases.
    pub fn pop(&mut self, slots: &Slots) -> Option<RequestId> {
        let next = loop {
            let next = self.queue.pop_front()?;
            if slots.find(next).is_some() {
                break next;
            }
        };
        self.one_less();
        Some(next)
    }

    /// One was discarded, and is released already.
    pub fn discarded(&mut self, slots: &Slots) {
        self.one_less();
        if self.queue.len() > 2 * self.len + 64 {
            self.queue.retain(|&id| slots.find(id).is_some());
        }
    }

    fn one_less(&mut self) {
        self.len -= 1;
        if self.len == 0 {
            self.queue = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::ids::Room;

    fn decide(decided: &mut Decided, slots: &mut Slots) -> RequestId {
        let Some(room) = Room::new(1) else { unreachable!() };
        let id = slots.insert_waiting(room, 0);
        decided.push(id);
        id
    }

    fn discard(decided: &mut Decided, slots: &mut Slots, id: RequestId) {
        slots.release(id.slot);
        decided.discarded(slots);
    }

    #[test]
    fn discarded_ones_do_not_come_out_even_when_their_slot_is_used_again() {
        let (mut decided, mut slots) = (Decided::default(), Slots::default());
        let ids: Vec<RequestId> = (0..3).map(|_| decide(&mut decided, &mut slots)).collect();
        discard(&mut decided, &mut slots, ids[1]);
        let again = decide(&mut decided, &mut slots);
        assert_eq!(again.slot, ids[1].slot);
        let mut out = Vec::new();
        while let Some(id) = decided.pop(&slots) {
            slots.release(id.slot);
            out.push(id);
        }
        assert_eq!(out, [ids[0], ids[2], again]);
        assert!(decided.is_empty());
    }

    #[test]
    fn discarded_ones_do_not_pile_up() {
        let (mut decided, mut slots) = (Decided::default(), Slots::default());
        let kept = decide(&mut decided, &mut slots);
        for _ in 0..10_000 {
            let id = decide(&mut decided, &mut slots);
            discard(&mut decided, &mut slots, id);
            assert!(decided.queue.len() <= 66);
        }
        assert_eq!((decided.len(), decided.pop(&slots)), (1, Some(kept)));
        assert_eq!(decided.queue.capacity(), 0);
    }
}
