//! The bootstrap registry of a prefill engine over HTTP.
//!
//! [`BootstrapServer::bind`] returns when the server listens. It runs on two threads of its own,
//! which know nothing of Python, so it answers while the interpreter is busy. The tables and all
//! their rules are [`disagg_core::registry`]; this crate moves bytes and reads the clock.

mod body;
mod connections;
mod error;
mod reply;
mod routes;
mod state;

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use socket2::SockRef;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

pub use disagg_core::registry::{OptionError, Options};
pub use error::BindError;

use connections::Closing;
use state::Shared;

/// A registry that listens; dropping it stops it without waiting.
///
/// After a fork the child's copy is dead: its threads stayed with the parent, so there
/// [`BootstrapServer::close`] and dropping do nothing.
#[derive(Debug)]
pub struct BootstrapServer {
    address: SocketAddr,
    owner: u32,
    running: Mutex<Option<Running>>,
}

impl BootstrapServer {
    /// Listens on `host` (a name or an IPv4 or IPv6 address) and `port`, 0 for any free one.
    ///
    /// # Errors
    /// [`BindError`] when the host has no address, or none that can be listened on.
    pub fn bind(host: &str, port: u16, options: &Options) -> Result<Self, BindError> {
        let failed = |source| BindError::new(host, port, source);
        let runtime = runtime().map_err(failed)?;
        let listener = listen(&runtime, host, port).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let listening = SockRef::from(&listener).try_clone().map_err(failed)?;
        let (close, closing) = watch::channel(Closing::No);
        let shared = Shared::new(options);
        runtime.spawn(state::tick(shared.clone(), closing.clone()));
        runtime.spawn(connections::accept(listener, routes::router(shared), closing));
        Ok(Self {
            address,
            owner: std::process::id(),
            running: Mutex::new(Some(Running { runtime, listening, close })),
        })
    }

    /// The address it listens on, or did.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it listens: it was not closed, and this is not a fork's child.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_owner() && self.lock().is_some()
    }

    /// Stops listening, closes idle connections, and waits up to `timeout` for answers that are on
    /// their way; what is left then is cut. Blocks; the second time it returns at once.
    pub fn close(&self, timeout: Duration) {
        if !self.is_owner() {
            return;
        }
        // The lock is held throughout, so that a second closer too returns to a closed server.
        let mut running = self.lock();
        if let Some(running) = running.take() {
            running.close(timeout);
        }
    }

    fn is_owner(&self) -> bool {
        self.owner == std::process::id()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Running>> {
        // Nothing that can panic runs between a change and its end under this lock.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BootstrapServer {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(running) = running.take() else {
            return;
        };
        if self.owner == std::process::id() {
            running.abandon();
        } else {
            // Its threads are the parent's: joining them here would wait for ever.
            std::mem::forget(running);
        }
    }
}

#[derive(Debug)]
struct Running {
    runtime: Runtime,
    /// The listening socket once more: a forked child may hold it too, so closing is not enough.
    listening: socket2::Socket,
    close: watch::Sender<Closing>,
}

impl Running {
    fn close(self, timeout: Duration) {
        let started = Instant::now();
        self.close.send_replace(Closing::Yes);
        self.stop_listening();
        let close = self.close;
        self.runtime.block_on(async move {
            // Every task holds a receiver: when all are gone, all connections are.
            let _timed_out = tokio::time::timeout(timeout, close.closed()).await;
        });
        let left = timeout.saturating_sub(started.elapsed());
        self.runtime.shutdown_timeout(left.max(LAST_WAIT));
    }

    fn abandon(self) {
        self.stop_listening();
        self.runtime.shutdown_background();
    }

    fn stop_listening(&self) {
        // It fails only where the socket is not listening any more, which is what is wanted.
        let _already_down = self.listening.shutdown(std::net::Shutdown::Both);
    }
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("disagg-registry")
        .enable_io()
        .enable_time()
        .build()
}

fn listen(runtime: &Runtime, host: &str, port: u16) -> std::io::Result<TcpListener> {
    // Tokio's sockets want a runtime around them.
    let _context = runtime.enter();
    let mut failure = std::io::Error::new(std::io::ErrorKind::NotFound, "the host has no address");
    for address in addresses(host, port)? {
        match listen_on(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A restart need not wait for old connections; two that listen still exclude each other.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn addresses(host: &str, port: u16) -> std::io::Result<impl Iterator<Item = SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (bare, port).to_socket_addrs()
}

/// An engine's ranks come all at once.
const BACKLOG: u32 = 1024;

/// For the threads to see that their work is gone.
const LAST_WAIT: Duration = Duration::from_millis(100);
