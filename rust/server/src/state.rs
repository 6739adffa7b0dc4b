//! The tables behind a lock, and the clock they are read with.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use disagg_core::registry::{Options, Registry};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::connections::Closing;

/// What all connections of one server share.
#[derive(Debug, Clone)]
pub struct Shared(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    started: Instant,
    registry: Mutex<Registry>,
}

impl Shared {
    pub fn new(options: &Options) -> Self {
        Self(Arc::new(Inner {
            started: Instant::now(),
            registry: Mutex::new(Registry::new(options, identity())),
        }))
    }

    /// The tables, and the time of this look at them.
    pub fn lock(&self) -> (MutexGuard<'_, Registry>, Duration) {
        // The tables change in whole steps, so what a panicking thread left is still consistent.
        let registry = self.0.registry.lock();
        let registry = registry.unwrap_or_else(PoisonError::into_inner);
        (registry, self.0.started.elapsed())
    }
}

/// Sweeps what expired, so that memory comes back without traffic.
pub async fn tick(shared: Shared, mut closing: watch::Receiver<Closing>) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = closing.changed() => return,
            _ = interval.tick() => {
                let (mut registry, now) = shared.lock();
                registry.on_timer(now);
            }
        }
    }
}

/// A random number: the standard library seeds its hashers from the operating system.
fn identity() -> u128 {
    let half = |salt: u32| u128::from(RandomState::new().hash_one((salt, std::process::id())));
    half(0) << 64 | half(1)
}

const TICK: Duration = Duration::from_secs(1);
