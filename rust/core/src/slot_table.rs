//! Slots by the hash of a key that the slots know themselves.

use alloc::vec::Vec;
use core::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::ids::index;

/// Numbers of slots, found by a key that is kept elsewhere.
///
/// A request is in two of these, by its room and by the identity of its object, and leaves both in a poll, where the
/// processor waits for memory more than for anything else. So what a removal touches is 5 bytes an entry: 9, with
/// the hash beside the slot, made a poll 10 to 20 % slower, and a map that holds the keys a third. The hashes are for
/// growing: to ask each slot for its key instead made one `insert` of 57,345 take 2.3 ms and not 0.8.
#[derive(Debug, Default)]
pub struct SlotTable {
    slots: HashTable<u32>,
    /// By slot; what is left of slots that are not here does not matter.
    hashes: Vec<u32>,
    hasher: DefaultHashBuilder,
}

impl SlotTable {
    /// Enter a slot that is not here yet.
    pub fn insert(&mut self, key: u64, slot: u32) {
        let hash = self.hash(key);
        if self.hashes.len() <= index(slot) {
            self.hashes.resize(index(slot) + 1, 0);
        }
        if let Some(place) = self.hashes.get_mut(index(slot)) {
            *place = hash;
        }
        let hashes = &self.hashes;
        let hash_of = |&slot: &u32| spread(hashes.get(index(slot)).copied().unwrap_or_default());
        self.slots.insert_unique(spread(hash), slot, hash_of);
    }

    /// The slot of `key`, of which `has_key` tells whether a slot has it.
    #[must_use]
    pub fn find(&self, key: u64, has_key: impl Fn(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        self.slots.find(spread(self.hash(key)), |&slot| has_key(slot)).copied()
    }

    /// Take out a slot that was entered with `key`; the last one gives all memory back.
    pub fn remove(&mut self, key: u64, slot: u32) {
        if let Ok(entry) = self.slots.find_entry(spread(self.hash(key)), |&other| other == slot) {
            entry.remove();
        }
        if self.slots.is_empty() {
            self.slots = HashTable::new();
            self.hashes = Vec::new();
        }
    }

    /// How many slots there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Bytes of memory.
    #[must_use]
    pub fn allocation_size(&self) -> usize {
        self.slots.allocation_size() + self.hashes.capacity() * size_of::<u32>()
    }

    fn hash(&self, key: u64) -> u32 {
        let [low, high] = halves(self.hasher.hash_one(key));
        low ^ high
    }
}

/// The table takes a bucket from the low bits and a tag from the seven highest: both halves are the same 32 bits.
fn spread(hash: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(hash)
}

fn halves(hash: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = hash.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Insert(u64),
        Remove(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![3 => (0..40_u64).prop_map(Op::Insert), 2 => any::<usize>().prop_map(Op::Remove)]
    }

    proptest! {
        #[test]
        fn finds_what_a_list_of_pairs_finds(ops in prop::collection::vec(op(), 0..200)) {
            let mut table = SlotTable::default();
            let mut keys: Vec<u64> = Vec::new();
            let mut model: Vec<u32> = Vec::new();
            for op in ops {
                match op {
                    Op::Insert(key) => {
                        let slot = u32::try_from(keys.len()).unwrap();
                        keys.push(key);
                        let has_key = |slot: u32| keys[index(slot)] == key;
                        if table.find(key, has_key).is_none() {
                            table.insert(key, slot);
                            model.push(slot);
                        }
                    }
                    Op::Remove(_) if model.is_empty() => {}
                    Op::Remove(place) => {
                        let slot = model.swap_remove(place % model.len());
                        table.remove(keys[index(slot)], slot);
                    }
                }
                prop_assert_eq!(table.len(), model.len());
                for key in 0..40 {
                    let has_key = |slot: u32| keys[index(slot)] == key;
                    prop_assert_eq!(table.find(key, has_key), model.iter().copied().find(|&slot| has_key(slot)));
                }
            }
        }
    }

    #[test]
    fn memory_is_back_at_its_start_when_the_last_slot_leaves() {
        let mut table = SlotTable::default();
        (0..1000).for_each(|slot| table.insert(u64::from(slot), slot));
        assert!(table.allocation_size() > 0);
        (0..1000).for_each(|slot| table.remove(u64::from(slot), slot));
        assert!(table.is_empty());
        assert_eq!(table.allocation_size(), 0);
    }

    #[test]
    fn removing_what_is_not_there_changes_nothing() {
        let mut table = SlotTable::default();
        table.insert(7, 0);
        table.remove(7, 1);
        table.remove(8, 1);
        assert_eq!(table.find(7, |slot| slot == 0), Some(0));
    }
}
