//! Why a server could not be started.

use std::fmt;
use std::io;

/// The server could not listen.
#[derive(Debug)]
pub struct BindError {
    host: String,
    port: u16,
    source: io::Error,
}

impl BindError {
    pub(crate) fn new(host: &str, port: u16, source: io::Error) -> Self {
        Self { host: host.to_owned(), port, source }
    }

    /// The operating system's error number, where it was the one that refused.
    #[must_use]
    pub fn os_error(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, source } = self;
        write!(f, "can't listen on host {host:?} port {port}: {source}")
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
