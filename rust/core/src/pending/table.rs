//! All endpoints of a dp rank in one answer, where the peer has it (WIRE.md section 4).

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::endpoints::Wanted;
use super::headers::{Headers, Identity};
use super::peer::Ready;
use super::route::{CommandKind, Endpoint};
use super::{Flight, HttpRequest, Machine};
use crate::ids::index;
use crate::rank_mapping::Contact;
use crate::topology::PrefillInfo;
use crate::wire::{self, RankEndpoint, Table};

impl Machine {
    /// One answer holds topology and endpoints, so no read has to confirm it.
    pub(super) fn on_table(
        &mut self,
        at: u32,
        flight: Flight,
        dp_rank: u32,
        status: u16,
        body: &[u8],
        headers: Headers<'_>,
    ) {
        let answered = || format!("answered {status} to the query of all endpoints");
        let table = match status {
            200 => wire::parse_table(body),
            429 | 500.. => return self.lookup_failed(at, flight, dp_rank, Wanted::Table, answered()),
            // What advertises the table and does not have it is no reason to fail anybody.
            _ => return self.give_up_table(at, answered()),
        };
        let table = match table {
            Ok(table) => table,
            Err(error) => return self.give_up_table(at, format!("protocol error: {error}")),
        };
        let headers = Headers {
            instance: headers.instance.or(table.instance.as_deref()),
            epoch: headers.epoch.or(table.epoch.as_deref()),
            ..headers
        }
        .within_limits();
        let peer = self.peers.at_mut(at);
        if peer.ready().is_none_or(|ready| !ready.info.is_same(&table.info)) {
            return self.replace(at, *table.info, headers);
        }
        if peer.identity.differs_from(headers) {
            return self.restart(at, Identity::of(headers));
        }
        peer.identity.learn(headers);
        if let Err(text) = self.take_endpoints(at, dp_rank, &table) {
            return self.give_up_table(at, text);
        }
        self.confirm_group(at, dp_rank);
    }

    /// Note where each contact of a dp rank listens.
    fn take_endpoints(&mut self, at: u32, dp_rank: u32, table: &Table) -> Result<(), String> {
        let Some(ready) = self.peers.at(at).ready() else { return Ok(()) };
        let mut endpoints = Vec::with_capacity(ready.contacts.len());
        for &Contact { cp, tp, pp, dummy } in &ready.contacts {
            let Some(found) = table.find((dp_rank, cp, tp, pp)) else {
                return Err(format!("rank dp{dp_rank}/cp{cp}/tp{tp}/pp{pp} is not among all endpoints"));
            };
            let RankEndpoint { ip, port } = self.checked(found.clone())?;
            endpoints.push(Some(Endpoint { cp, tp, pp, ip, port, dummy }));
        }
        if let Some(group) =
            self.peers.at_mut(at).ready_mut().and_then(|ready| ready.groups.get_mut(&dp_rank))
        {
            group.found = endpoints;
        }
        Ok(())
    }

    /// Look the ranks of this peer up one by one, from now on and in this life.
    pub(super) fn give_up_table(&mut self, at: u32, text: String) {
        let Some(ready) = self.peers.at_mut(at).ready_mut() else { return };
        ready.features.table = false;
        let all = ready.all_contacts_wanted();
        let mut in_flight = Vec::new();
        // The one that was answered, those in flight and those that wait to be asked.
        for group in ready.groups.values_mut().filter(|group| group.route_id().is_none()) {
            in_flight.append(&mut group.in_flight);
            group.wanted.clone_from(&all);
            group.last_error.clone_from(&text);
        }
        ready.lookups_in_flight -= crate::ids::number(in_flight.len());
        in_flight.sort_unstable();
        for ticket in in_flight {
            self.cancel(ticket);
        }
    }
}

impl Ready {
    /// Whether the endpoints of a dp rank come in one answer. Its parsing holds the lock, so it must not be long.
    pub(super) fn has_table(&self) -> bool {
        self.features.table && ranks(&self.info) <= MOST_RANKS
    }
}

pub(super) fn table_query(dp_rank: u32, info: &PrefillInfo) -> HttpRequest {
    let path = format!("/routes?dp_rank={dp_rank}");
    HttpRequest::get(CommandKind::Endpoint, path, 1024 + 128 * index(ranks(info)))
}

/// Ranks of one dp rank.
fn ranks(info: &PrefillInfo) -> u32 {
    info.attn_cp_size() * info.attn_tp_size() * info.pp_size()
}

/// Above that one answer would hold the lock for over 1 ms; look-ups do so a little at a time.
const MOST_RANKS: u32 = 512;
