//! The objects of the requests that are held, by slot and by identity.

use std::mem;

use disagg_core::ids::{RequestId, index};
use disagg_core::slot_table::SlotTable;
use pyo3::prelude::*;

/// The objects of the requests that are held.
///
/// Nothing here runs Python code, so that it may be used under the lock: identity is the address of an object that
/// is kept alive here, and an object that is given up goes to the caller, who drops it after unlocking.
#[derive(Default)]
pub struct Held {
    objects: Vec<Option<(RequestId, Py<PyAny>)>>,
    by_identity: SlotTable,
}

impl Held {
    /// Hold the object of a new request; it is not held yet.
    pub fn keep(&mut self, id: RequestId, object: Py<PyAny>) {
        let slot = index(id.slot);
        self.by_identity.insert(identity(&object), id.slot);
        if self.objects.len() <= slot {
            self.objects.resize_with(slot + 1, || None);
        }
        if let Some(place) = self.objects.get_mut(slot) {
            *place = Some((id, object));
        }
    }

    /// The request of an object, if it is held.
    pub fn find(&self, object: &Py<PyAny>) -> Option<RequestId> {
        let held = |slot| self.objects.get(index(slot)).and_then(Option::as_ref);
        let is_it = |slot| held(slot).is_some_and(|(_, held)| held.is(object));
        let slot = self.by_identity.find(identity(object), is_it)?;
        held(slot).map(|&(id, _)| id)
    }

    /// Give up the object of a request, to be dropped after unlocking.
    pub fn let_go(&mut self, id: RequestId) -> Option<Py<PyAny>> {
        let (_, object) = self.objects.get_mut(index(id.slot))?.take_if(|(held, _)| *held == id)?;
        self.by_identity.remove(identity(&object), id.slot);
        self.reset_if_empty();
        Some(object)
    }

    /// Give up the objects of many requests, to be dropped after unlocking. `ends` go along.
    pub fn let_many_go<T>(&mut self, ends: Vec<(RequestId, T)>) -> Vec<(RequestId, Py<PyAny>, T)> {
        let mut gone = Vec::with_capacity(ends.len());
        // Two loops, each with little between one object and the next, so that the processor waits for the memory of
        // several at a time.
        for (id, end) in ends {
            let place = self.objects.get_mut(index(id.slot));
            if let Some((_, object)) = place.and_then(|place| place.take_if(|(held, _)| *held == id)) {
                gone.push((id, object, end));
            }
        }
        for (id, object, _) in &gone {
            self.by_identity.remove(identity(object), id.slot);
        }
        self.reset_if_empty();
        gone
    }

    /// Give up everything, to be dropped after unlocking.
    pub fn let_all_go(&mut self) -> Self {
        mem::take(self)
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.objects.iter().flatten().map(|(_, object)| object)
    }

    fn reset_if_empty(&mut self) {
        if self.by_identity.is_empty() {
            // All is done: memory goes back to its start.
            self.objects = Vec::new();
        }
    }
}

fn identity(object: &Py<PyAny>) -> u64 {
    u64::try_from(object.as_ptr().addr()).unwrap_or(u64::MAX)
}
