//! What a step may hold, and how a request may end.

use core::time::Duration;
use std::sync::Arc;

use disagg_core::failure::{Failure, FailureKind};
use disagg_core::pending::{Outcome, Route, Stats, Step};
use disagg_core::retry::seconds;

use super::Oracle;
use super::requests::Request;

impl Oracle {
    pub fn on_poll(&mut self, limit: usize, step: &Step, stats: &Stats) {
        self.clock.poll();
        self.peers.values_mut().for_each(|peer| peer.failed_since_poll = false);
        self.steps_are_numbered(limit, step, stats);
        self.events_are_told_once_and_in_order(step);
        self.ends_come_in_order_of_arrival(step);
        for (id, outcome) in &step.ended {
            let place = self.held.iter().position(|request| request.id == *id);
            let Some(place) = place else { panic!("{id:?} is not held, and ends: {outcome:?}") };
            let request = self.held.remove(place);
            self.gone.push(*id);
            self.check_end(&request, outcome);
            if let Outcome::Routed(route) = outcome {
                self.track(request.room, &route.addr);
            }
        }
        if !step.more {
            self.nobody_waits_who_has_ended();
        }
    }

    fn steps_are_numbered(&mut self, limit: usize, step: &Step, stats: &Stats) {
        let holds_something = !step.ended.is_empty() || !step.events.is_empty();
        self.last_step += u64::from(holds_something);
        assert_eq!(step.seq, if holds_something { self.last_step } else { 0 });
        assert!(step.ended.len() <= limit);
        assert!(!step.more || step.ended.len() == limit, "{step:?}");
        assert_eq!(step.more, stats.decided > 0, "{stats:?}");
    }

    fn events_are_told_once_and_in_order(&mut self, step: &Step) {
        let expected = std::mem::take(&mut self.events);
        if self.unsure {
            return;
        }
        let rooms = |rooms: &[disagg_core::ids::Room]| rooms.iter().map(|room| room.number()).collect();
        let told: Vec<_> =
            step.events.iter().map(|it| (it.kind, it.addr.to_string(), rooms(&it.rooms))).collect();
        assert_eq!(told, expected);
    }

    /// J6: within a step each address's requests come in order of arrival; in fact all do.
    fn ends_come_in_order_of_arrival(&self, step: &Step) {
        let seq = |id| self.held.iter().find(|request| request.id == id).map(|request| request.seq);
        let order: Vec<_> = step.ended.iter().map(|&(id, _)| seq(id)).collect();
        assert!(order.is_sorted(), "{order:?}");
    }

    /// J5, J7: whatever ended a request, the next step has it; and timers leave none that is too old.
    fn nobody_waits_who_has_ended(&self) {
        let options = &self.setup.options;
        let timeout = seconds(options.request_timeout_s);
        let of_stages = seconds(options.dp_rank_timeout_s + options.endpoint_timeout_s);
        for request in &self.held {
            assert!(!request.due, "it ended and is in no step: {request:?}");
            let in_stages = request.stages.as_ref().map(|stages| self.clock.read() - stages.since);
            let stuck = in_stages.is_some_and(|lived| lived >= of_stages);
            let overdue = self.age(request) >= timeout || (stuck && !self.unsure);
            assert!(!overdue || self.timers_called < self.now(), "for {:?}: {request:?}", self.age(request));
        }
    }

    fn check_end(&mut self, request: &Request, outcome: &Outcome) {
        match outcome {
            Outcome::Routed(route) => self.check_routed(request, route),
            Outcome::Failed(failure) => self.check_failed(request, failure),
        }
    }

    fn check_routed(&mut self, request: &Request, route: &Arc<Route>) {
        assert_eq!(*route.addr, *request.addr);
        assert!(request.owns_room && request.must_fail_with.is_none(), "{request:?} {route:?}");
        assert!(!route.fake);
        if self.unsure {
            return;
        }
        let life = self.routes.check(route);
        // J9: nothing of a life that was over when the request came.
        assert!(life >= request.least_life, "{request:?} {route:?}");
        self.routes.check_rank(route, request.room, request.preset, self.setup.options.force_query);
    }

    fn check_failed(&mut self, request: &Request, failure: &Failure) {
        assert_eq!(*failure.addr, *request.addr);
        let says_where = failure.reason.starts_with(&request.addr);
        assert!(says_where || failure.kind == FailureKind::Told, "{failure:?}");
        // J4: waiting and time in flight are no attempts.
        let counted = failure.attempts <= request.ceiling;
        assert!(counted || self.unsure, "over {}: {failure:?}", request.ceiling);
        let of_caller = failure.kind == FailureKind::DpRankOutOfRange && request.preset.is_some();
        let status = if of_caller { 400 } else { failure.kind.http_status() };
        let mut expected_status = Some(status).filter(|_| failure.kind != FailureKind::Told);
        if let Some(must) = &request.must_fail_with {
            assert_eq!(failure.kind, must.kind, "{failure:?}");
            assert!(failure.reason.contains(&must.reason), "{failure:?} {must:?}");
            expected_status = must.status.or(expected_status);
        } else if !self.unsure {
            self.kind_is_what_happened(request, failure);
        }
        assert_eq!(Some(failure.http_status), expected_status, "{failure:?}");
    }

    fn kind_is_what_happened(&self, request: &Request, failure: &Failure) {
        let (options, policy) = (&self.setup.options, &self.setup.policy);
        let happened = request.may_fail_with.contains(failure.kind.as_str());
        let waited = |timeout_s| request.owns_room && self.age(request) >= seconds(timeout_s);
        let in_stages = |timeout_s| {
            request.first_ready.is_some_and(|since| self.clock.read() - since >= seconds(timeout_s))
        };
        let good = match failure.kind {
            // J4: not before the budget is spent, nor before the least wait is over.
            FailureKind::Unreachable | FailureKind::NotReady | FailureKind::ProtocolError => {
                happened && failure.attempts >= policy.max_attempts && waited(policy.min_wait_s)
            }
            // J7: only what a peer said for good, to this request or before it came.
            FailureKind::NotARegistry | FailureKind::Incompatible => happened && failure.attempts > 0,
            FailureKind::Cooldown | FailureKind::TooManyAddresses => happened && !request.owns_room,
            FailureKind::DpRankOutOfRange => happened || request.preset.is_some_and(|preset| preset > 0),
            FailureKind::DpRankTimeout => in_stages(options.dp_rank_timeout_s),
            FailureKind::EndpointTimeout => in_stages(options.endpoint_timeout_s),
            FailureKind::RequestTimeout => waited(options.request_timeout_s),
            FailureKind::PeerLost
            | FailureKind::RankMissing
            | FailureKind::Closed
            | FailureKind::Internal => happened,
            // Those are decided when the request comes or its room is told, and `must_fail_with` then.
            FailureKind::DuplicateRoom | FailureKind::Told | FailureKind::NotAllowed => false,
        };
        let age: Duration = self.age(request);
        assert!(good, "after {age:?}: {request:?} {failure:?}");
    }
}
