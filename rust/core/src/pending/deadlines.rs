//! Requests that waited too long, by the scheduler's clock.

use alloc::format;
use alloc::string::String;

use super::slots::{Outcome, Stage};
use super::{Machine, and_last_error, failure};
use crate::failure::FailureKind;
use crate::retry::seconds;
use crate::time::Tick;

impl Machine {
    /// End the requests whose deadline has passed on the scheduler's clock.
    pub(super) fn end_overdue(&mut self) {
        let lived = self.lived();
        let passed = |since: Tick, timeout_s: f64| since.after(seconds(timeout_s)) <= lived;
        let options = self.options;
        while let Some(at) = self.requests.ages.first()
            && passed(self.requests.slots.at(at).added, options.request_timeout_s)
        {
            let text = self.request_timeout_text(at);
            self.end_one(at, FailureKind::RequestTimeout, &text);
        }
        while let Some(at) = self.requests.deadlines.need_dp_rank.first()
            && passed(self.requests.slots.at(at).stage_since, options.dp_rank_timeout_s)
        {
            let text = self.dp_rank_timeout_text(at);
            self.end_one(at, FailureKind::DpRankTimeout, &text);
        }
        while let Some(at) = self.requests.deadlines.need_endpoints.first()
            && passed(self.requests.slots.at(at).stage_since, options.endpoint_timeout_s)
        {
            let text = self.endpoint_timeout_text(at);
            self.end_one(at, FailureKind::EndpointTimeout, &text);
        }
    }

    /// When the next deadline passes, if the scheduler's clock gets there without another poll.
    pub(super) fn next_deadline(&self) -> Option<Tick> {
        let slots = &self.requests.slots;
        let age = self.requests.ages.first().map(|at| (slots.at(at).added, self.options.request_timeout_s));
        let stage = |first: Option<u32>, timeout_s| first.map(|at| (slots.at(at).stage_since, timeout_s));
        let dp_rank = stage(self.requests.deadlines.need_dp_rank.first(), self.options.dp_rank_timeout_s);
        let endpoint = stage(self.requests.deadlines.need_endpoints.first(), self.options.endpoint_timeout_s);
        [age, dp_rank, endpoint]
            .into_iter()
            .flatten()
            .filter_map(|(since, timeout_s)| self.clock.when(since.after(seconds(timeout_s))))
            .min()
    }

    fn end_one(&mut self, at: u32, kind: FailureKind, text: &str) {
        let peer_index = self.requests.slots.at(at).peer;
        let peer = self.peers.at(peer_index);
        let attempts = if kind == FailureKind::RequestTimeout { peer.budget.failed } else { 0 };
        let shared = failure(kind, &peer.addr, text, attempts);
        let failure = self.with_contacted(peer_index, at, &shared);
        self.requests.decide(self.peers.at_mut(peer_index), at, Outcome::Failed(failure));
        self.rearm(peer_index);
    }

    fn stage_name(&self, at: u32) -> &'static str {
        match self.requests.slots.at(at).stage {
            Stage::NeedInfo => "need_info",
            Stage::NeedDpRank(_) => "need_dp_rank",
            Stage::NeedEndpoints(_) => "need_endpoints",
            Stage::Free | Stage::Decided(_) => "decided",
        }
    }

    fn request_timeout_text(&self, at: u32) -> String {
        let (stage, timeout_s) = (self.stage_name(at), self.options.request_timeout_s);
        let restarted = match self.peers.at(self.requests.slots.at(at).peer).restarts {
            0 => String::new(),
            1 => String::from("; the peer restarted once since it last gave a route"),
            many => format!("; the peer restarted {many} times since it last gave a route"),
        };
        format!("not placed within {timeout_s} s; last stage: {stage}{restarted}")
    }

    fn dp_rank_timeout_text(&self, at: u32) -> String {
        let slot = self.requests.slots.at(at);
        let error = self.peers.at(slot.peer).ready().map_or("", |ready| &ready.query.error);
        format!(
            "no dp rank for room {} within {} s, asked {} times{}",
            slot.room,
            self.options.dp_rank_timeout_s,
            slot.asked,
            and_last_error(error)
        )
    }

    fn endpoint_timeout_text(&self, at: u32) -> String {
        let slot = self.requests.slots.at(at);
        let Stage::NeedEndpoints(dp_rank) = slot.stage else {
            unreachable!("the list holds only requests that wait for endpoints")
        };
        let group = self.peers.at(slot.peer).ready().and_then(|ready| ready.groups.get(&dp_rank));
        let error = group.map_or("", |group| &group.last_error);
        let timeout_s = self.options.endpoint_timeout_s;
        format!("endpoints of dp rank {dp_rank} not read within {timeout_s} s{}", and_last_error(error))
    }
}
