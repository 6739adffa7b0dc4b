//! When to try an address again: the policy, and jitter as a function.

use core::fmt;
use core::time::Duration;

/// How an address is tried. [`RetryPolicy::DEFAULT`] is the home of the defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Attempts before the requests that wait are failed, at least 1.
    pub max_attempts: u32,
    /// Seconds from the start of one attempt to the start of the next.
    pub interval_s: f64,
    /// Factor of the interval from one attempt to the next, at least 1.
    pub multiplier: f64,
    /// Upper bound of the grown interval, in seconds.
    pub max_interval_s: f64,
    /// Fraction of an interval that jitter may take off, 0..=1.
    pub jitter: f64,
    /// Seconds without attempts after the budget was spent or the peer was refused.
    pub cooldown_s: f64,
    /// Seconds that each request waits at least before a spent budget fails it.
    pub min_wait_s: f64,
    /// Whether the poll after a failure releases the next attempt, instead of the interval.
    pub per_cycle: bool,
}

/// A policy that cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyError {
    /// Which field.
    pub field: &'static str,
    /// Its value.
    pub value: f64,
    /// What it must be.
    pub rule: &'static str,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.field, self.value, self.rule)
    }
}

impl RetryPolicy {
    /// Attempts spaced by wall clock, as upstream does since March 2026.
    pub const DEFAULT: Self = Self {
        max_attempts: 15,
        interval_s: 1.0,
        multiplier: 1.0,
        max_interval_s: 30.0,
        jitter: 0.0,
        cooldown_s: 15.0,
        min_wait_s: 5.0,
        per_cycle: false,
    };

    /// Check the ranges of all fields.
    ///
    /// # Errors
    /// The first field that is out of its range.
    pub fn validated(self) -> Result<Self, PolicyError> {
        let positive = "must be a number over 0 and at most 86400";
        let not_negative = "must be a number from 0 to 86400";
        let rules = [
            ("interval_s", self.interval_s, self.interval_s > 0.0 && self.interval_s <= DAY, positive),
            (
                "multiplier",
                self.multiplier,
                (1.0..=1_000.0).contains(&self.multiplier),
                "must be from 1 to 1000",
            ),
            (
                "max_interval_s",
                self.max_interval_s,
                self.max_interval_s > 0.0 && self.max_interval_s <= DAY,
                positive,
            ),
            ("jitter", self.jitter, (0.0..=1.0).contains(&self.jitter), "must be from 0 to 1"),
            ("cooldown_s", self.cooldown_s, (0.0..=DAY).contains(&self.cooldown_s), not_negative),
            ("min_wait_s", self.min_wait_s, (0.0..=DAY).contains(&self.min_wait_s), not_negative),
        ];
        if self.max_attempts == 0 {
            return Err(PolicyError { field: "max_attempts", value: 0.0, rule: "must be at least 1" });
        }
        match rules.into_iter().find(|(_, _, good, _)| !good) {
            Some((field, value, _, rule)) => Err(PolicyError { field, value, rule }),
            None => Ok(self),
        }
    }

    /// From the start of `attempt` (counted from 1) to the start of the next; `unit` in [0, 1) scales the jitter.
    #[must_use]
    pub fn gap(&self, attempt: u32, unit: f64) -> Duration {
        let mut delay = self.interval_s;
        for _ in 1..attempt {
            // Also ends the loop when the multiplier is 1, where it would change nothing.
            if delay >= self.max_interval_s || self.multiplier <= 1.0 {
                break;
            }
            delay *= self.multiplier;
        }
        seconds(delay.min(self.max_interval_s) * (1.0 - self.jitter * unit))
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A number of seconds as a duration, cut to whole nanoseconds; negative and not a number are zero.
#[must_use]
pub fn seconds(number: f64) -> Duration {
    let nanos = number * 1e9;
    #[expect(clippy::as_conversions, reason = "float to int has no other form; it saturates, and NaN is 0")]
    let whole = nanos as u64;
    Duration::from_nanos(whole)
}

/// A number in [0, 1) that is the same everywhere for the same seed, address and attempt.
///
/// FNV-1a (64 bits) of the address, mixed with seed and attempt by SplitMix64's finaliser.
#[must_use]
pub fn unit_interval(seed: u64, addr: &str, attempt: u32) -> f64 {
    let hash = addr.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut state = (hash ^ seed).wrapping_add(u64::from(attempt).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^= state >> 31;
    #[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "53 bits are exact in an f64")]
    let mantissa = (state >> 11) as f64;
    mantissa * (1.0 / 9_007_199_254_740_992.0)
}

const DAY: f64 = 86_400.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_grow_to_the_cap_and_stay() {
        let policy =
            RetryPolicy { interval_s: 1.0, multiplier: 2.0, max_interval_s: 5.0, ..RetryPolicy::DEFAULT };
        let gaps: alloc::vec::Vec<u64> = (1..=5).map(|n| policy.gap(n, 0.0).as_secs()).collect();
        assert_eq!(gaps, [1, 2, 4, 5, 5]);
    }

    #[test]
    fn jitter_shortens_by_at_most_its_fraction() {
        let policy = RetryPolicy { jitter: 0.25, ..RetryPolicy::DEFAULT };
        for attempt in 1..100 {
            let gap = policy.gap(attempt, unit_interval(7, "10.0.0.7:8998", attempt)).as_secs_f64();
            assert!((0.75..=1.0).contains(&gap), "{gap}");
        }
    }

    #[test]
    fn bad_policies_are_refused_by_field() {
        let bad = RetryPolicy { interval_s: f64::NAN, ..RetryPolicy::DEFAULT };
        assert_eq!(bad.validated().map_err(|error| error.field), Err("interval_s"));
        assert!(RetryPolicy::DEFAULT.validated().is_ok());
    }
}
