//! Laws of `disagg_core::pending::Machine` that hold whatever happens in whatever order.
//!
//! There is no second machine to compare with (tests/test_pending_model.py does that): an oracle keeps books of what goes
//! in and comes out, and checks the laws J1, J3 to J7 and J9 of TRANSFER_PLAN.md section 9 and the drive contract
//! between the two, after each event. Each check is a function named after the fact that it proves.
//!
//! A default run takes some seconds. A long one: `PROPTEST_CASES=20000 cargo test --locked -p disagg-core --test machine`.

// Clippy takes only what is under `cfg(test)` for a test, where `unwrap` and indexing are allowed.
#[cfg(test)]
mod ending;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod replies;
#[cfg(test)]
mod retries;
#[cfg(test)]
mod script;
#[cfg(test)]
mod setup;
#[cfg(test)]
mod world;

#[cfg(test)]
mod laws {
    use proptest::prelude::*;

    use crate::ending::everything_ends_and_nothing_is_left;
    use crate::retries::{Run, story};
    use crate::script::script;
    use crate::setup::setup;
    use crate::world::{Mode, World};

    /// As many cases as take some seconds in debug, if the environment does not say how many.
    fn config() -> ProptestConfig {
        let default = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        match std::env::var_os("PROPTEST_CASES") {
            Some(_) => default,
            None => ProptestConfig { cases: 1_000, ..default },
        }
    }

    proptest! {
        #![proptest_config(config())]

        /// J1, J3 to J7, J9, in any order of events: see the oracle.
        #[test]
        fn laws_hold_in_any_order_of_events((setup, script) in (setup(), script(60))) {
            let mut world = World::run(&setup, &script, Mode::default());
            everything_ends_and_nothing_is_left(&mut world, &setup);
        }

        /// J3, J4 exactly, as long as a peer fails for a while.
        #[test]
        fn attempts_and_ends_come_when_the_policy_says(story in story()) {
            Run::new(story).play();
        }

        /// The same script gives the same, however the hash tables are seeded.
        #[test]
        fn same_script_gives_the_same_commands_and_steps((setup, script) in (setup(), script(60))) {
            let traced = Mode { traced: true, ..Mode::default() };
            let [one, other] = [0, 1].map(|_| World::run(&setup, &script, traced).trace);
            prop_assert_eq!(one, other);
        }

        /// A clock that goes back is taken for one that stands still.
        #[test]
        fn clock_that_goes_back_stands_still((setup, script) in (setup(), script(60))) {
            let traced = Mode { traced: true, ..Mode::default() };
            let never_back = Mode { never_back: true, ..traced };
            let [one, other] = [traced, never_back].map(|mode| World::run(&setup, &script, mode).trace);
            prop_assert_eq!(one, other);
        }

        /// Timers that are called exactly when they were announced miss nothing that timers every 10 ms would see.
        #[test]
        fn announced_timers_miss_nothing((setup, script) in (setup(), script(30))) {
            let punctual = Mode { traced: true, punctual: true, ..Mode::default() };
            let restless = Mode { restless: true, ..punctual };
            let [one, other] = [punctual, restless].map(|mode| World::run(&setup, &script, mode).trace);
            prop_assert_eq!(one, other);
        }
    }
}
