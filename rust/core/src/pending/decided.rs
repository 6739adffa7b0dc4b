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
