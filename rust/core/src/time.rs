//! Instants as numbers that the driver gives, and the clock that stands still with the scheduler.

use core::time::Duration;

/// An instant: nanoseconds since a start that the driver chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(u64);

impl Tick {
    /// The driver's start of time.
    pub const ZERO: Self = Self(0);

    /// The end of time.
    pub const MAX: Self = Self(u64::MAX);

    /// An instant `nanos` after the start.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// This much later, at most the end of time.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        Self(self.0.saturating_add(nanos(by)))
    }

    /// How long after `earlier` this is; zero when it is not.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Time as the scheduler lives it: it stands still when no poll came for a second, and while paused.
///
/// Deadlines of requests are kept on this clock, so an engine that stops for a weight update finds them shifted
/// without anybody walking over them.
#[derive(Clone, Debug)]
pub struct SchedulerClock {
    last_poll: Tick,
    /// How long the clock has stood still in all.
    shift: Duration,
    paused_at: Option<Tick>,
}

impl SchedulerClock {
    /// How long a poll may stay away before the clock stops.
    pub const GRACE: Duration = Duration::from_secs(1);

    /// A clock that runs from `now` on.
    #[must_use]
    pub const fn new(now: Tick) -> Self {
        Self { last_poll: now, shift: Duration::ZERO, paused_at: None }
    }

    /// What the clock shows at `now`.
    #[must_use]
    pub fn read(&self, now: Tick) -> Tick {
        match self.paused_at {
            Some(at) => at,
            None => Tick(now.min(self.horizon()).0.saturating_sub(nanos(self.shift))),
        }
    }

    /// Whether the clock is stopped at `now`.
    #[must_use]
    pub fn stands_still(&self, now: Tick) -> bool {
        self.paused_at.is_some() || now > self.horizon()
    }

    /// When the clock shows `shown`, if it gets there without another poll, or did before it was paused.
    #[must_use]
    pub fn when(&self, shown: Tick) -> Option<Tick> {
        let at = shown.after(self.shift);
        let reached = match self.paused_at {
            Some(paused) => shown <= paused,
            None => at <= self.horizon(),
        };
        reached.then_some(at)
    }

    /// The scheduler polled.
    pub fn on_poll(&mut self, now: Tick) {
        if self.paused_at.is_none() {
            self.shift = self.shift.saturating_add(now.since(self.horizon()));
        }
        self.last_poll = now;
    }

    /// Stop until `resume`.
    pub fn pause(&mut self, now: Tick) {
        if self.paused_at.is_none() {
            self.paused_at = Some(self.read(now));
        }
    }

    /// Go on after `pause`.
    pub fn resume(&mut self, now: Tick) {
        if let Some(at) = self.paused_at.take() {
            self.shift = now.since(at);
            self.last_poll = now;
        }
    }

    fn horizon(&self) -> Tick {
        self.last_poll.after(Self::GRACE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Tick {
        Tick::ZERO.after(Duration::from_millis(millis))
    }

    #[test]
    fn clock_stands_still_after_a_second_without_poll() {
        let mut clock = SchedulerClock::new(Tick::ZERO);
        assert_eq!(clock.read(at(700)), at(700));
        assert_eq!(clock.read(at(5_000)), at(1_000));
        clock.on_poll(at(5_000));
        assert_eq!(clock.read(at(5_500)), at(1_500));
        assert_eq!(clock.when(at(1_900)), Some(at(5_900)));
        assert_eq!(clock.when(at(2_100)), None, "out of reach until the next poll");
    }

    #[test]
    fn paused_clock_tells_when_it_showed_what_came_before_the_pause() {
        let mut clock = SchedulerClock::new(Tick::ZERO);
        clock.on_poll(at(5_000));
        clock.pause(at(5_500));
        assert_eq!(
            clock.when(at(1_500)),
            Some(at(5_500)),
            "a deadline then is due, and nothing else says so"
        );
        assert_eq!(clock.when(at(1_501)), None);
    }

    #[test]
    fn pause_and_resume_cost_deadlines_nothing() {
        let mut clock = SchedulerClock::new(Tick::ZERO);
        clock.pause(at(300));
        clock.on_poll(at(800));
        assert!(clock.stands_still(at(800)));
        assert_eq!(clock.read(at(60_000)), at(300));
        clock.resume(at(60_000));
        assert_eq!(clock.read(at(60_200)), at(500));
    }
}
