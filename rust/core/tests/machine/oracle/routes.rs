//! What a route must be made of.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use disagg_core::ids::{RouteId, Ticket};
use disagg_core::pending::Route;

use super::peers::Flight;
use crate::setup::TOPOLOGIES;

/// All lives of all peers, all endpoints that were answered, and all routes that came out.
#[derive(Default)]
pub struct Routes {
    lives: Vec<Life>,
    endpoints: BTreeMap<u16, Found>,
    /// Ranks that peers answered, by life and room.
    ranks: BTreeSet<(u64, u64, u32)>,
    seen: BTreeMap<RouteId, Arc<Route>>,
    retired: BTreeSet<RouteId>,
}

/// One topology of one peer, from its answer on.
struct Life {
    addr: String,
    /// Which time it is that the address is known: one that was forgotten begins anew.
    met: u64,
    topology: usize,
    epoch: Option<u64>,
    /// The last read that said the same.
    confirmed_by: Option<Ticket>,
}

/// An endpoint that a peer answered in time.
struct Found {
    life: u64,
    path: String,
    /// No read that was handed out before may confirm it.
    handed_out: Ticket,
}

impl Routes {
    pub fn begin_life(&mut self, addr: &str, met: u64, topology: usize) -> u64 {
        self.lives.push(Life { addr: addr.into(), met, topology, epoch: None, confirmed_by: None });
        u64::try_from(self.lives.len()).unwrap()
    }

    pub fn last_life(&self) -> u64 {
        u64::try_from(self.lives.len()).unwrap()
    }

    pub fn confirm(&mut self, life: u64, ticket: Ticket) {
        let confirmed = &mut self.life(life).confirmed_by;
        *confirmed = (*confirmed).max(Some(ticket));
    }

    pub fn find_endpoint(&mut self, port: u16, flight: &Flight, handed_out: Ticket) {
        let life = flight.life.expect("look-ups are asked in some life");
        self.endpoints.insert(port, Found { life, path: flight.path.clone(), handed_out });
    }

    /// The port that was last answered to the same look-up in the same life.
    pub fn port(&self, flight: &Flight) -> Option<u16> {
        let same = |found: &Found| Some(found.life) == flight.life && found.path == flight.path;
        self.endpoints.iter().rev().find(|(_, found)| same(found)).map(|(&port, _)| port)
    }

    pub fn find_rank(&mut self, life: u64, room: u64, rank: u32) {
        self.ranks.insert((life, room, rank));
    }

    pub fn retire(&mut self, id: RouteId) {
        assert!(self.retired.insert(id), "{id:?} was retired before");
    }

    /// Check a route that places a request; the life that it is of.
    pub fn check(&mut self, route: &Arc<Route>) -> u64 {
        if let Some(seen) = self.seen.get(&route.id) {
            assert!(Arc::ptr_eq(seen, route), "two routes have one id: {seen:?} {route:?}");
        }
        self.seen.insert(route.id, Arc::clone(route));
        let life = self.endpoints_are_of_one_life(route);
        self.info_is_the_topology_last_read(route, life);
        self.epoch_is_the_life(route, life);
        self.endpoints_were_confirmed(route, life);
        life
    }

    pub fn check_all_are_retired(&self) {
        let left: Vec<_> = self.seen.keys().filter(|id| !self.retired.contains(id)).collect();
        assert!(left.is_empty(), "never retired: {left:?}");
    }

    pub fn check_not_retired(&self, route: &Route) {
        assert!(!self.retired.contains(&route.id), "{:?} was retired and is given out", route.id);
    }

    /// J9: what was asked of one snapshot of a peer is never mixed with what was asked of another.
    fn endpoints_are_of_one_life(&self, route: &Route) -> u64 {
        let mut lives = BTreeSet::new();
        for endpoint in &route.endpoints {
            let Some(found) = self.endpoints.get(&endpoint.port) else {
                panic!("no answer that was awaited says {endpoint:?}: {route:?}")
            };
            let wanted = [
                format!("prefill_dp_rank={}&prefill_cp_rank={}&", route.dp_rank, endpoint.cp),
                format!("target_tp_rank={}&target_pp_rank={}", endpoint.tp, endpoint.pp),
            ];
            let older = format!(
                "engine_rank={}&target_dp_group={}&target_pp_rank={}",
                endpoint.tp, route.dp_rank, endpoint.pp
            );
            let asked = wanted.iter().all(|part| found.path.contains(part)) || found.path.contains(&older);
            assert!(asked, "{endpoint:?} is the answer to {}: {route:?}", found.path);
            lives.insert(found.life);
        }
        let lives: Vec<u64> = lives.into_iter().collect();
        let [life] = lives[..] else { panic!("endpoints of the lives {lives:?}: {route:?}") };
        life
    }

    /// J9: the topology of a route is the one whose ranks were looked up.
    fn info_is_the_topology_last_read(&mut self, route: &Route, life: u64) {
        let life = self.life(life);
        let topology = &TOPOLOGIES[life.topology];
        assert_eq!(*route.addr, *life.addr);
        assert_eq!(route.info.as_deref(), Some(&topology.info()), "{route:?}");
        assert!(topology.fits && route.dp_rank < topology.dp_size, "{route:?}");
        assert_eq!(route.endpoints.len(), topology.contacts, "{route:?}");
        let mapping = route.mapping.as_ref().expect("only fake transfers have none");
        let contacts: Vec<_> = mapping.contacts().map(|it| (it.cp, it.tp, it.pp, it.dummy)).collect();
        let found: Vec<_> = route.endpoints.iter().map(|it| (it.cp, it.tp, it.pp, it.dummy)).collect();
        assert_eq!(found, contacts);
    }

    /// J9: one life, one epoch; later lives of an address that was known throughout have greater ones.
    fn epoch_is_the_life(&mut self, route: &Route, life: u64) {
        assert!(route.epoch > 0);
        assert_eq!(*self.life(life).epoch.get_or_insert(route.epoch), route.epoch, "{route:?}");
        let (met, addr) = (self.life(life).met, &*route.addr);
        let lives = self.lives.iter().filter(|life| life.met == met && *life.addr == *addr);
        let epochs: Vec<u64> = lives.filter_map(|life| life.epoch).collect();
        assert!(epochs.is_sorted_by(|earlier, later| earlier < later), "{epochs:?}: {route:?}");
    }

    /// J9: after the last endpoint was answered, a read was handed out and said the same topology.
    fn endpoints_were_confirmed(&mut self, route: &Route, life: u64) {
        let last = route.endpoints.iter().map(|endpoint| self.endpoints[&endpoint.port].handed_out).max();
        let confirmed = self.life(life).confirmed_by;
        assert!(confirmed > last, "confirmed by {confirmed:?}, answered after {last:?}: {route:?}");
    }

    /// The dp rank is the preset, or what the rule or the peer says of the room.
    pub fn check_rank(&mut self, route: &Route, room: u64, preset: Option<u32>, force_query: bool) {
        let life = self.endpoints[&route.endpoints[0].port].life;
        let topology = &TOPOLOGIES[self.life(life).topology];
        let older_form = self.endpoints[&route.endpoints[0].port].path.contains("engine_rank");
        let by_rule = u32::try_from(room % u64::from(topology.dp_size)).unwrap();
        if let Some(preset) = preset {
            assert_eq!(route.dp_rank, preset, "{route:?}");
        } else if topology.dp_size == 1 || (topology.follows && !force_query) || older_form {
            assert_eq!(route.dp_rank, by_rule, "room {room}: {route:?}");
        } else {
            assert!(self.ranks.contains(&(life, room, route.dp_rank)), "nobody said so: {room} {route:?}");
        }
    }

    fn life(&mut self, number: u64) -> &mut Life {
        &mut self.lives[usize::try_from(number).unwrap() - 1]
    }
}
