//! How every run ends: the network falls silent, and all is over in bounded time.

use core::time::Duration;

use disagg_core::TransportError;
use disagg_core::failure::FailureKind;
use disagg_core::ids::Ticket;
use disagg_core::retry::seconds;
use disagg_core::time::Tick;

use crate::script::Timers;
use crate::setup::Setup;
use crate::world::World;

/// J5: with polls and timers and without answers every request ends within `request_timeout_s`; and after all is over
/// nothing is held, by time alone and by `fail_all`.
pub fn everything_ends_and_nothing_is_left(world: &mut World, setup: &Setup) {
    catch_up(world);
    world.resume();
    world.poll(usize::MAX);
    let polls = seconds(setup.options.request_timeout_s).as_millis() / SLICE.as_millis();
    for _ in 0..=polls {
        if world.oracle.held.is_empty() {
            break;
        }
        live_without_answers(world);
    }
    assert!(world.oracle.held.is_empty(), "some never end: {:?}", world.oracle.held);
    world.release_all();
    world.wait(seconds(setup.options.peer_ttl_s), Timers::Late);
    world.poll(usize::MAX);
    world.check_nothing_is_left();
    world.fail_all(FailureKind::Closed);
    world.listen();
    world.check_nothing_is_left();
    world.oracle.check_all_routes_are_retired();
}

/// The clock shows again what it showed before it went back.
fn catch_up(world: &mut World) {
    world.listen();
    world.wait_until(world.oracle.now());
}

fn live_without_answers(world: &mut World) {
    world.wait(SLICE, Timers::Punctual);
    let total = Duration::from_secs(2);
    let old = |started: Tick| world.oracle.now().since(started) >= total;
    let timed_out: Vec<Ticket> =
        world.oracle.flights.values().filter(|it| old(it.started)).map(|it| it.ticket).collect();
    for ticket in timed_out {
        if world.oracle.flights.contains_key(&ticket) {
            world.fail_one(ticket, TransportError::Timeout);
            world.listen();
        }
    }
    world.poll(usize::MAX);
    world.listen();
}

const SLICE: Duration = Duration::from_millis(500);
