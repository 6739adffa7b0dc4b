//! A client as plain as can be, so that nothing is hidden from the tests.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use disagg_server::{BootstrapServer, Options};
use serde_json::{Value, json};

pub const ALL: &str = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find_map(|(key, value)| key.eq_ignore_ascii_case(name).then_some(value))
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

pub fn server() -> BootstrapServer {
    BootstrapServer::bind("127.0.0.1", 0, &Options::DEFAULT).unwrap()
}

pub fn connect(server: &BootstrapServer) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

pub fn raw(server: &BootstrapServer, request: &[u8]) -> Answer {
    let mut stream = connect(server);
    // The server may answer, and close, before it has read all of a bad request.
    let _ = stream.write_all(request);
    read(&mut stream)
}

pub fn read(stream: &mut TcpStream) -> Answer {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") {
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "cut: {text:?}");
        text.push(byte[0]);
    }
    let head = String::from_utf8(text).unwrap();
    let mut answer = Answer { status: head[9..12].parse().unwrap(), head, body: String::new() };
    let length = answer.header("content-length").map_or(0, |n| n.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap_or_else(|error| {
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof); // HEAD
        body.clear();
    });
    answer.body = String::from_utf8(body).unwrap();
    answer
}

pub fn send(server: &BootstrapServer, method: &str, path: &str, body: &str) -> Answer {
    send_with(server, method, path, "", body)
}

pub fn send_with(server: &BootstrapServer, method: &str, path: &str, header: &str, body: &str) -> Answer {
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: anything at all\r\nConnection: close\r\n{header}Content-Length: {length}\r\n\r\n{body}"
    );
    raw(server, request.as_bytes())
}

pub fn rank(tp: u16, rank: u16) -> Value {
    json!({
        "attn_tp_size": tp, "attn_tp_rank": rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": 2000 + rank,
        "page_size": 64, "kv_cache_dtype": "bfloat16",
    })
}

pub fn put(server: &BootstrapServer, body: &Value) -> Answer {
    send(server, "PUT", "/route", &body.to_string())
}

pub fn at(tp: u16) -> String {
    format!("/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank={tp}&target_pp_rank=0")
}
