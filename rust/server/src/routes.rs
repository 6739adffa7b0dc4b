//! The routes: parse, one look at the tables, answer.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::ALLOW;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::Response;
use axum::routing::{any, get, post};
use disagg_core::registry::{Put, Registration, Registry, RoomPut, RoomQuery, RouteQuery, View};
use serde_json::json;

use crate::body;
use crate::reply::Reply;
use crate::state::Shared;

/// All routes of one server.
pub fn router(shared: Shared) -> Router {
    Router::new()
        .route("/route", any(route))
        .route("/register_dp_rank", post(register_room))
        .route("/query_dp_ranks", post(query_rooms))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(shared)
}

/// Axum's own choice by method would let GET answer HEAD, which upstream refuses here.
async fn route(State(shared): State<Shared>, request: Request) -> Response {
    match *request.method() {
        Method::GET => look_up(&shared, request.uri(), request.headers()),
        Method::PUT => register(&shared, request.into_body()).await,
        _ => {
            let mut response = wrong_method(State(shared), request).await;
            let allowed = HeaderValue::from_static("GET,PUT");
            response.headers_mut().insert(ALLOW, allowed);
            response
        }
    }
}

async fn register(shared: &Shared, body: Body) -> Response {
    let put = match read(body, Put::from_json).await {
        Ok(put) => put,
        Err(reply) => return refuse(shared, reply),
    };
    answer(shared, |registry, now| match put {
        Put::Rank(rank) => store(registry, now, *rank),
        Put::NotPrefill => Reply::ok(),
    })
}

fn store(registry: &mut Registry, now: Duration, rank: Registration) -> Reply {
    match registry.on_register(now, rank) {
        Ok(()) => Reply::ok(),
        Err(conflict) => conflict.into(),
    }
}

fn look_up(shared: &Shared, uri: &Uri, headers: &HeaderMap) -> Response {
    let query = match parse_query(uri) {
        Ok(query) => query,
        Err(reply) => return refuse(shared, reply),
    };
    let knows_newer_keys = headers.contains_key("x-disagg-client");
    answer(shared, |registry, now| match query {
        RouteQuery::Topology(dialect) => {
            let view = View { dialect, knows_newer_keys };
            registry.topology(now, view).map_or_else(Reply::from, Reply::json)
        }
        RouteQuery::Rank(at) => registry.endpoint(now, at).map_or_else(Reply::from, |found| {
            Reply::json(json!({"rank_ip": found.ip, "rank_port": found.port}).to_string())
        }),
    })
}

fn parse_query(uri: &Uri) -> Result<RouteQuery, Reply> {
    let text = uri.query().unwrap_or_default();
    let pairs: Vec<_> = form_urlencoded::parse(text.as_bytes()).collect();
    let pairs = pairs.iter().map(|(key, value)| (key.as_ref(), value.as_ref()));
    RouteQuery::from_pairs(pairs).map_err(Reply::from)
}

async fn register_room(State(shared): State<Shared>, request: Request) -> Response {
    match read(request.into_body(), RoomPut::from_json).await {
        Ok(room) => answer(&shared, |registry, now| {
            registry.on_room(now, &room);
            Reply::ok()
        }),
        Err(reply) => refuse(&shared, reply),
    }
}

async fn query_rooms(State(shared): State<Shared>, request: Request) -> Response {
    match read(request.into_body(), RoomQuery::from_json).await {
        Ok(query) => {
            answer(&shared, |registry, now| Reply::json(ranks_json(&registry.dp_ranks(now, &query))))
        }
        Err(reply) => refuse(&shared, reply),
    }
}

fn ranks_json(ranks: &BTreeMap<u64, u16>) -> String {
    serde_json::to_string(ranks).unwrap_or_else(|_| unreachable!("integer keys are JSON keys"))
}

async fn health(State(shared): State<Shared>) -> Response {
    refuse(&shared, Reply::ok())
}

async fn ready(State(shared): State<Shared>) -> Response {
    answer(
        &shared,
        |registry, now| {
            if registry.is_ready(now) { Reply::ok() } else { registry.not_ready().into() }
        },
    )
}

async fn no_route(State(shared): State<Shared>, uri: Uri) -> Response {
    let text = format!("no such route: {}", uri.path());
    refuse(&shared, Reply::refusal(StatusCode::NOT_FOUND, &text, None))
}

async fn wrong_method(State(shared): State<Shared>, request: Request) -> Response {
    let text = format!("{} has no {}", request.uri().path(), request.method());
    refuse(&shared, Reply::refusal(StatusCode::METHOD_NOT_ALLOWED, &text, None))
}

async fn read<T, E: Into<Reply>>(body: Body, parse: impl FnOnce(&[u8]) -> Result<T, E>) -> Result<T, Reply> {
    let body = body::read(body).await.map_err(Reply::from)?;
    parse(&body).map_err(E::into)
}

/// Answers from the tables and stamps the answer under one lock, so that both are of one snapshot.
fn answer(shared: &Shared, reply: impl FnOnce(&mut Registry, Duration) -> Reply) -> Response {
    let (mut registry, now) = shared.lock();
    let reply = reply(&mut registry, now);
    let stamp = registry.stamp(now);
    drop(registry);
    reply.stamped(&stamp)
}

/// An answer that needs nothing of the tables but the stamp.
fn refuse(shared: &Shared, reply: Reply) -> Response {
    answer(shared, |_, _| reply)
}
