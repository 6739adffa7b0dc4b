//! The scheduler's time, added up as it passes; the core computes it from shifts.

use core::time::Duration;

use disagg_core::time::Tick;

/// How long the scheduler has lived.
pub struct Lived {
    pub now: Tick,
    lived: Duration,
    last_poll: Tick,
    paused: bool,
}

impl Lived {
    pub fn new() -> Self {
        Self { now: Tick::ZERO, lived: Duration::ZERO, last_poll: Tick::ZERO, paused: false }
    }

    /// Time passes; it never goes back.
    pub fn pass(&mut self, to: Tick) {
        if !self.paused {
            self.lived += to.min(self.stop()).since(self.now);
        }
        self.now = self.now.max(to);
    }

    pub fn read(&self) -> Duration {
        self.lived
    }

    pub fn stands_still(&self) -> bool {
        self.paused || self.now > self.stop()
    }

    pub fn poll(&mut self) {
        self.last_poll = self.now;
    }

    pub fn pause(&mut self) {
        self.paused = true;
    }

    pub fn resume(&mut self) {
        if self.paused {
            self.last_poll = self.now;
        }
        self.paused = false;
    }

    /// A poll that stays away for a second stops the clock.
    fn stop(&self) -> Tick {
        self.last_poll.after(Duration::from_secs(1))
    }
}
