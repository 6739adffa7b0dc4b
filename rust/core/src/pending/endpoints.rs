//! Where the ranks of a dp rank listen: looked up once per epoch, confirmed by a read of the topology.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::peer::{Group, GroupState};
use super::route::{CommandKind, Endpoint, Route};
use super::slots::{Link, Outcome, Stage};
use super::table::table_query;
use super::{Flight, HttpRequest, MAX_TOPOLOGY_BYTES, Machine, Purpose, failure};
use crate::allow::Verdict;
use crate::answer::Dialect;
use crate::failure::{Coordinates, Failure, FailureKind};
use crate::ids::{RouteId, Ticket, index};
use crate::rank_mapping::Contact;
use crate::wire::{self, RankEndpoint};

/// What is to be looked up of a dp rank.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    /// Everything in one answer.
    Table,
    /// One contact.
    Contact(u32),
}

impl Machine {
    /// Whether later requests may still get this route.
    #[must_use]
    pub fn is_cached(&self, route: &Route) -> bool {
        let ready = self.peers.find(&route.addr).and_then(|at| self.peers.at(at).ready());
        let group = ready.and_then(|ready| ready.groups.get(&route.dp_rank));
        group.and_then(Group::route_id) == Some(route.id)
    }

    pub(super) fn need_endpoints(&mut self, at: u32, request: u32, dp_rank: u32) {
        let peer = self.peers.at_mut(at);
        let Some(ready) = peer.ready_mut() else {
            return;
        };
        if !ready.groups.contains_key(&dp_rank) {
            ready.create_group(dp_rank);
        }
        let route = match ready.groups.get(&dp_rank).map(|group| &group.state) {
            Some(GroupState::Ready(route)) => Some(Arc::clone(route)),
            Some(GroupState::Looking | GroupState::Waiting { .. } | GroupState::Reading { .. }) | None => {
                None
            }
        };
        if let Some(route) = route {
            return self.requests.decide(peer, request, Outcome::Routed(route));
        }
        self.requests.transition(peer, request, Stage::NeedEndpoints(dp_rank));
    }

    /// Start look-ups, oldest group first, up to the peer's limit.
    pub(super) fn pump_lookups(&mut self, at: u32) {
        let most = self.options.max_endpoint_lookups_per_peer;
        loop {
            let peer = self.peers.at_mut(at);
            let dialect = peer.dialect;
            let Some(ready) = peer.ready_mut().filter(|ready| ready.lookups_in_flight < most) else {
                return;
            };
            let Some((dp_rank, wanted)) = ready.next_lookup() else {
                return;
            };
            let request = match wanted {
                Wanted::Table => table_query(dp_rank, &ready.info),
                Wanted::Contact(contact) => {
                    let Some(rank) = ready.contacts.get(index(contact)) else {
                        return;
                    };
                    lookup(dialect, dp_rank, rank)
                }
            };
            let ticket = self.send(at, Purpose::Lookup { dp_rank, wanted }, self.now, request);
            let Some(ready) = self.peers.at_mut(at).ready_mut() else {
                return;
            };
            ready.lookups_in_flight += 1;
            if let Some(group) = ready.groups.get_mut(&dp_rank) {
                group.in_flight.push(ticket);
            }
        }
    }

    pub(super) fn on_endpoint(
        &mut self,
        at: u32,
        flight: Flight,
        (dp_rank, contact): (u32, u32),
        status: u16,
        body: &[u8],
    ) {
        if status == 404 {
            return self.rank_not_found(at, flight, dp_rank, contact);
        }
        if status != 200 {
            let text = format!("answered {status} to the endpoint query");
            return self.lookup_failed(at, flight, dp_rank, Wanted::Contact(contact), text);
        }
        let found = wire::parse_endpoint(body).map_err(|error| format!("protocol error: {error}"));
        match found.and_then(|found| self.checked(found)) {
            Ok(found) => self.lookup_found(at, (dp_rank, contact), found),
            Err(text) => self.lookup_failed(at, flight, dp_rank, Wanted::Contact(contact), text),
        }
    }

    /// The endpoint, unless it lies where no route may lead.
    pub(super) fn checked(&self, found: RankEndpoint) -> Result<RankEndpoint, String> {
        match &self.allowed.rank_hosts {
            Some(hosts) if hosts.verdict(&found.ip) != Verdict::Allowed => {
                Err(format!("protocol error: rank_ip {:?} is not in allowed_rank_hosts", found.ip))
            }
            Some(_) | None => Ok(found),
        }
    }

    fn lookup_found(&mut self, at: u32, (dp_rank, contact): (u32, u32), found: RankEndpoint) {
        let from = Ticket(self.last_ticket + 1);
        let Some(ready) = self.peers.at_mut(at).ready_mut() else { return };
        let Some(&Contact { cp, tp, pp, dummy }) = ready.contacts.get(index(contact)) else { return };
        let Some(group) = ready.groups.get_mut(&dp_rank) else { return };
        if let Some(place) = group.found.get_mut(index(contact)) {
            *place = Some(Endpoint { cp, tp, pp, ip: found.ip, port: found.port, dummy });
        }
        if group.is_complete() {
            ready.set_group(dp_rank, GroupState::Reading { from });
        }
    }

    /// A failed look-up spends no budget; it is paced, and the stage's deadline ends it.
    pub(super) fn lookup_failed(
        &mut self,
        at: u32,
        flight: Flight,
        dp_rank: u32,
        wanted: Wanted,
        text: String,
    ) {
        let mut until = flight.started.after(self.interval());
        let Some(ready) = self.peers.at_mut(at).ready_mut() else {
            return;
        };
        let Some(group) = ready.groups.get_mut(&dp_rank) else {
            return;
        };
        group.wanted.insert(0, wanted);
        group.last_error = text;
        if let GroupState::Waiting { until: later } = group.state {
            until = until.max(later);
        }
        ready.set_group(dp_rank, GroupState::Waiting { until });
    }

    /// Groups whose pause after a failed look-up is over.
    pub(super) fn retry_lookups(&mut self, at: u32) {
        let now = self.now;
        loop {
            let Some(ready) = self.peers.at_mut(at).ready_mut() else {
                return;
            };
            let Some(&(_, dp_rank)) = ready.waiting.first().filter(|(until, _)| *until <= now) else {
                return;
            };
            if ready.groups.get(&dp_rank).is_some_and(|group| group.waiters.is_empty()) {
                self.drop_group(at, dp_rank);
            } else {
                ready.set_group(dp_rank, GroupState::Looking);
            }
        }
    }

    /// A read showed the same topology as before: go on where the group was.
    pub(super) fn confirm_group(&mut self, at: u32, dp_rank: u32) {
        self.last_route += 1;
        let id = RouteId(self.last_route);
        let peer = self.peers.at_mut(at);
        let (addr, epoch) = (Arc::clone(&peer.addr), peer.epoch);
        let Some(ready) = peer.ready_mut() else {
            return;
        };
        let Some(group) = ready.groups.get_mut(&dp_rank) else {
            return;
        };
        if !group.wanted.is_empty() {
            return ready.set_group(dp_rank, GroupState::Looking);
        }
        let route = Arc::new(Route {
            id,
            addr,
            dp_rank,
            mapping: Some(Arc::clone(&ready.mapping)),
            endpoints: core::mem::take(&mut group.found).into_iter().flatten().collect(),
            info: Some(Arc::clone(&ready.info)),
            epoch,
            fake: false,
        });
        self.peers.at_mut(at).restarts = 0;
        self.completed.push(Arc::clone(&route));
        for waiter in self.waiters(at, dp_rank) {
            self.requests.decide(self.peers.at_mut(at), waiter, Outcome::Routed(Arc::clone(&route)));
        }
        if let Some(ready) = self.peers.at_mut(at).ready_mut() {
            ready.set_group(dp_rank, GroupState::Ready(route));
        }
    }

    /// The first time the topology is read and everything looked up again; the second time the rank is missing.
    fn rank_not_found(&mut self, at: u32, flight: Flight, dp_rank: u32, contact: u32) {
        let from = Ticket(self.last_ticket + 1);
        let until = flight.started.after(self.interval());
        let peer = self.peers.at(at);
        let Some(ready) = peer.ready() else { return };
        let Some(rank) = ready.contacts.get(index(contact)) else {
            return;
        };
        let again = ready.groups.get(&dp_rank).is_some_and(|group| group.not_found);
        let name = format!("rank dp{dp_rank}/cp{}/tp{}/pp{} is not registered", rank.cp, rank.tp, rank.pp);
        let missing = failure(FailureKind::RankMissing, &peer.addr, &format!("{name} (404 twice)"), 0);
        let waiters = self.waiters(at, dp_rank);
        if again {
            let shared = waiters.first().map(|&first| self.with_contacted(at, first, &missing));
            for &waiter in &waiters {
                let shared = Arc::clone(shared.as_ref().unwrap_or(&missing));
                self.requests.decide(self.peers.at_mut(at), waiter, Outcome::Failed(shared));
            }
        }
        let old = self.drop_group(at, dp_rank);
        let Some(ready) = self.peers.at_mut(at).ready_mut() else {
            return;
        };
        ready.create_group(dp_rank);
        if let (Some(old), Some(group)) = (old, ready.groups.get_mut(&dp_rank)) {
            group.waiters = old.waiters;
            group.not_found = !again;
            group.last_error = format!("{name} (404)");
        }
        let state = if again { GroupState::Waiting { until } } else { GroupState::Reading { from } };
        ready.set_group(dp_rank, state);
    }

    /// Forget a group and what is in flight for it; its waiters stay linked to one another.
    fn drop_group(&mut self, at: u32, dp_rank: u32) -> Option<Group> {
        let ready = self.peers.at_mut(at).ready_mut()?;
        let group = ready.remove_group(dp_rank)?;
        ready.lookups_in_flight -= crate::ids::number(group.in_flight.len());
        for &ticket in &group.in_flight {
            self.cancel(ticket);
        }
        Some(group)
    }

    /// The requests that wait for one dp rank, in order of arrival.
    pub(super) fn waiters(&self, at: u32, dp_rank: u32) -> Vec<u32> {
        let group = self.peers.at(at).ready().and_then(|ready| ready.groups.get(&dp_rank));
        let Some(group) = group else {
            return Vec::new();
        };
        let mut waiters: Vec<u32> = self.requests.slots.iter(&group.waiters, Link::Peer).collect();
        waiters.sort_by_key(|&at| self.requests.slots.at(at).seq);
        waiters
    }

    /// The failure with the prefill ranks whose endpoints this request's group had read.
    pub(super) fn with_contacted(&self, at: u32, request: u32, shared: &Arc<Failure>) -> Arc<Failure> {
        let Stage::NeedEndpoints(dp_rank) = self.requests.slots.at(request).stage else {
            return Arc::clone(shared);
        };
        let group = self.peers.at(at).ready().and_then(|ready| ready.groups.get(&dp_rank));
        let found = group.into_iter().flat_map(|group| group.found.iter().flatten());
        let contacted: Vec<Coordinates> =
            found.map(|endpoint| (dp_rank, endpoint.cp, endpoint.tp, endpoint.pp)).collect();
        if contacted.is_empty() {
            return Arc::clone(shared);
        }
        Arc::new(Failure { contacted, ..(**shared).clone() })
    }
}

impl super::peer::Ready {
    /// What a new group has to look up.
    pub(super) fn everything_wanted(&self) -> Vec<Wanted> {
        if self.has_table() { Vec::from([Wanted::Table]) } else { self.all_contacts_wanted() }
    }

    /// The contacts one by one.
    pub(super) fn all_contacts_wanted(&self) -> Vec<Wanted> {
        (0..crate::ids::number(self.contacts.len())).rev().map(Wanted::Contact).collect()
    }

    /// The next thing to look up, which is then in flight.
    fn next_lookup(&mut self) -> Option<(u32, Wanted)> {
        for &(_, dp_rank) in &self.looking {
            if let Some(wanted) = self.groups.get_mut(&dp_rank).and_then(|group| group.wanted.pop()) {
                return Some((dp_rank, wanted));
            }
        }
        None
    }

    /// A look-up came back, in whatever way.
    pub(super) fn land(&mut self, ticket: Ticket, dp_rank: u32) {
        self.lookups_in_flight -= 1;
        if let Some(group) = self.groups.get_mut(&dp_rank) {
            group.in_flight.retain(|&other| other != ticket);
        }
    }
}

impl Group {
    /// Everything is looked up, so that only the confirmation is left.
    fn is_complete(&self) -> bool {
        matches!(self.state, GroupState::Looking) && self.wanted.is_empty() && self.in_flight.is_empty()
    }

    /// The id of a cached route.
    pub(super) fn route_id(&self) -> Option<RouteId> {
        match &self.state {
            GroupState::Ready(route) => Some(route.id),
            GroupState::Looking | GroupState::Waiting { .. } | GroupState::Reading { .. } => None,
        }
    }
}

pub(super) fn lookup(dialect: Dialect, dp_rank: u32, rank: &Contact) -> HttpRequest {
    let Contact { cp, tp, pp, .. } = rank;
    let path = match dialect {
        Dialect::E3 => format!(
            "/route?prefill_dp_rank={dp_rank}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
        ),
        Dialect::E2 => {
            format!("/route?engine_rank={tp}&target_dp_group={dp_rank}&target_pp_rank={pp}")
        }
    };
    HttpRequest::get(CommandKind::Endpoint, path, MAX_TOPOLOGY_BYTES)
}
