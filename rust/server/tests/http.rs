//! The registry over real sockets, spoken to in plain HTTP/1.1.

#[cfg(test)]
mod client;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use client::{ALL, at, connect, put, rank, raw, read, send, send_with, server};
use disagg_core::wire::parse_not_ready;
use disagg_server::{BootstrapServer, Options};
use serde_json::json;

#[test]
fn an_engine_registers_and_is_found() {
    let server = server();
    assert_eq!(send(&server, "GET", ALL, "").status, 503);
    assert_eq!(send(&server, "GET", "/ready", "").status, 503);
    for tp in 0..2 {
        let answer = put(&server, &rank(2, tp));
        assert_eq!((answer.status, answer.body.as_str()), (200, "OK"));
        assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
    }
    let topology = send(&server, "GET", ALL, "");
    assert_eq!(topology.status, 200);
    assert_eq!(topology.json()["attn_tp_size"], 2);
    assert_eq!(topology.header("x-disagg-epoch"), Some("1"));
    let found = send(&server, "GET", &at(1), "");
    assert_eq!(found.json(), json!({"rank_ip": "10.0.0.1", "rank_port": 2001}));
    assert_eq!(send(&server, "GET", &at(2), "").status, 404);
    assert_eq!(send(&server, "GET", "/ready", "").status, 200);
}

#[test]
fn rooms_are_registered_and_found() {
    let server = server();
    let register = |body: &str| send(&server, "POST", "/register_dp_rank", body).status;
    assert_eq!(register(r#"{"bootstrap_room": 5, "dp_rank": 3}"#), 200);
    assert_eq!(register(r#"{"bootstrap_room": -5, "dp_rank": 3}"#), 400);
    let found = send(&server, "POST", "/query_dp_ranks", r#"{"bootstrap_rooms": [5, 6, "05"]}"#);
    assert_eq!((found.status, found.body.as_str()), (200, r#"{"5":3}"#));
}

#[test]
fn every_answer_carries_instance_and_epoch() {
    let server = server();
    let instance = "X-SGLang-Disaggregation-Instance-ID";
    let known = send(&server, "GET", "/health", "").header(instance).unwrap().to_owned();
    let answers = [
        send(&server, "GET", ALL, ""),
        send(&server, "PATCH", "/route", ""),
        send(&server, "GET", "/nowhere", ""),
        send(&server, "PUT", "/route", "{"),
        send(&server, "POST", "/register_dp_rank", "{}"),
        put(&server, &rank(1, 0)),
        send(&server, "GET", ALL, ""),
    ];
    for answer in answers {
        assert_eq!(answer.header(instance), Some(known.as_str()), "{answer:?}");
        assert!(answer.header("x-disagg-epoch").is_some());
    }
}

#[test]
fn refusals_are_json_and_change_nothing() {
    let server = server();
    put(&server, &rank(2, 0));
    let mut other = rank(4, 1);
    let conflict = put(&server, &other);
    assert_eq!(conflict.status, 409);
    assert_eq!(
        conflict.json(),
        json!({"error": "attn_tp_size is 4 here and 2 at the ranks that registered before",
               "field": "attn_tp_size", "registered": "2", "sent": "4"})
    );
    other["rank_port"] = json!(true);
    let bad = put(&server, &other);
    assert_eq!((bad.status, bad.json()["field"].as_str()), (400, Some("rank_port")));
    let mut policy = rank(2, 1);
    policy["decode_allocation_policy"] = json!("prefill_complete");
    assert_eq!(put(&server, &policy).status, 400, "as upstream");
    let waiting = send(&server, "GET", ALL, "");
    assert_eq!(waiting.status, 503);
    assert_eq!(
        waiting.json()["error"],
        "not ready: 1 of 2 ranks registered; missing (dp, cp, tp, pp): (0, 0, 1, 0)"
    );
    assert_eq!(parse_not_ready(waiting.body.as_bytes()).unwrap(), "waiting for tp1");
}

#[test]
fn wrong_methods_and_paths_say_so() {
    let server = server();
    for (method, path, allow) in [
        ("POST", "/route", "GET,PUT"),
        ("DELETE", "/route", "GET,PUT"),
        ("GET", "/register_dp_rank", "POST"),
        ("PUT", "/query_dp_ranks", "POST"),
        ("POST", "/health", "GET,HEAD"),
        ("POST", "/ready", "GET,HEAD"),
    ] {
        let answer = send(&server, method, path, "");
        assert_eq!(answer.status, 405, "{method} {path}");
        assert_eq!(answer.header("allow"), Some(allow), "{method} {path}");
        assert_eq!(answer.json()["error"], format!("{path} has no {method}"));
    }
    let head = send(&server, "HEAD", "/route", "");
    assert_eq!((head.status, head.body.as_str()), (405, ""));
    assert_eq!(send(&server, "HEAD", "/health", "").status, 200);
    for path in ["/", "/route/", "/Route"] {
        assert_eq!(send(&server, "GET", path, "").status, 404);
    }
}

#[test]
fn a_client_of_ours_is_told_the_newer_keys() {
    let server = server();
    put(&server, &rank(1, 0));
    let key = "enable_kv_cache_sharding";
    assert!(send(&server, "GET", ALL, "").json().get(key).is_none());
    let ours = send_with(&server, "GET", ALL, "X-Disagg-Client: 1\r\n", "");
    assert_eq!(ours.json()[key], false);
}

#[test]
fn the_second_era_is_served() {
    let server = server();
    let mut body = rank(1, 0);
    body["role"] = json!("Prefill");
    let fields = body.as_object_mut().unwrap();
    fields.remove("attn_cp_size");
    fields.remove("attn_cp_rank");
    assert_eq!(put(&server, &body).status, 200);
    let topology = send(&server, "GET", "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1", "");
    assert_eq!(topology.json()["prefill_attn_tp_size"], 1);
    let found = send(&server, "GET", "/route?engine_rank=0&target_dp_group=0&target_pp_rank=0", "");
    assert_eq!(found.json()["rank_port"], 2000);
}

#[test]
fn large_bodies_are_refused_however_they_come() {
    let server = server();
    let large = " ".repeat(1024 * 1024 + 1);
    assert_eq!(send(&server, "PUT", "/route", &large).status, 413);
    let chunked = format!(
        "POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{large}\r\n0\r\n\r\n",
        large.len()
    );
    assert_eq!(raw(&server, chunked.as_bytes()).status, 413);
    let whole = format!("{}{}", " ".repeat(1024 * 1024 - 2), "{}");
    assert_eq!(send(&server, "PUT", "/route", &whole).status, 400, "just not too large");
    let rooms = format!("{{\"bootstrap_rooms\": [{}1]}}", "1,".repeat(10_000));
    let many = send(&server, "POST", "/query_dp_ranks", &rooms);
    assert_eq!((many.status, many.json()["field"].as_str()), (413, Some("bootstrap_rooms")));
}

#[test]
fn a_head_that_is_too_large_ends_its_connection_only() {
    let server = server();
    let head = format!("GET /health HTTP/1.1\r\nX-Long: {}\r\n\r\n", "x".repeat(200_000));
    assert_eq!(raw(&server, head.as_bytes()).status, 431);
    assert_eq!(send(&server, "GET", "/health", "").status, 200);
}

#[test]
fn half_a_body_is_not_a_request() {
    let server = server();
    let mut stream = connect(&server);
    let body = rank(1, 0).to_string();
    write!(stream, "PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len() + 1)
        .unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.starts_with("HTTP/1.1 200"), "{rest}");
    assert_eq!(send(&server, "GET", ALL, "").status, 503);
}

#[test]
fn a_connection_is_kept_alive() {
    let server = server();
    let mut stream = connect(&server);
    for _ in 0..3 {
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert_eq!(read(&mut stream).status, 200);
    }
}

#[test]
fn closing_does_not_wait_for_idle_connections() {
    let server = server();
    let mut idle = connect(&server);
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    assert_eq!(read(&mut idle).status, 200);
    let started = Instant::now();
    server.close(Duration::from_secs(10));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0, "it was told");
    assert!(TcpStream::connect(server.address()).is_err());
    assert!(!server.is_open());
    server.close(Duration::from_secs(10));
}

#[test]
fn closing_waits_for_its_timeout_at_most() {
    let server = server();
    let mut slow = connect(&server);
    slow.write_all(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    server.close(Duration::from_millis(200));
    let taken = started.elapsed();
    assert!(taken >= Duration::from_millis(200) && taken < Duration::from_secs(2), "{taken:?}");
}

#[test]
fn a_port_is_one_servers_only_and_free_once_it_is_closed() {
    let first = server();
    let (port, mut client) = (first.address().port(), connect(&first));
    client.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    read(&mut client);
    let refused = BootstrapServer::bind("127.0.0.1", port, &Options::DEFAULT).unwrap_err();
    assert!(refused.os_error().is_some());
    assert!(refused.to_string().starts_with("can't listen on host \"127.0.0.1\" port "), "{refused}");
    first.close(Duration::from_secs(1));
    let second = BootstrapServer::bind("127.0.0.1", port, &Options::DEFAULT).unwrap();
    assert_eq!(send(&second, "GET", "/health", "").status, 200);
    drop(second);
    assert!(BootstrapServer::bind("127.0.0.1", port, &Options::DEFAULT).is_ok());
}

#[test]
fn ipv6_is_served_with_and_without_brackets() {
    for host in ["::1", "[::1]"] {
        let server = match BootstrapServer::bind(host, 0, &Options::DEFAULT) {
            Ok(server) => server,
            // A machine without IPv6: the address can't be there.
            Err(error) => return eprintln!("not tested: {error}"),
        };
        assert!(server.address().is_ipv6());
        assert_eq!(send(&server, "GET", "/health", "").status, 200);
    }
}
