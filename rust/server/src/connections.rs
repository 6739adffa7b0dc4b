//! The accept loop and the life of one connection.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Whether the server is going away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    No,
    Yes,
}

/// Serves what connects to `listener` until the server closes.
pub async fn accept(listener: TcpListener, router: Router, mut closing: watch::Receiver<Closing>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let next = tokio::select! {
            biased;
            _ = closing.changed() => return,
            next = connect(&listener, &slots) => next,
        };
        match next {
            Some((stream, slot)) => {
                tokio::spawn(serve(stream, slot, router.clone(), closing.clone()));
            }
            // Out of descriptors, most likely: let some connections end first.
            None => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn connect(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    let (stream, _peer) = listener.accept().await.ok()?;
    Some((stream, slot))
}

async fn serve(
    stream: TcpStream,
    _slot: OwnedSemaphorePermit,
    router: Router,
    mut closing: watch::Receiver<Closing>,
) {
    // Answers are small: waiting to fill a packet would only delay them.
    let _not_supported = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    // Whatever ends a connection concerns its client alone.
    tokio::select! {
        _ended = connection.as_mut() => return,
        _ = closing.changed() => connection.as_mut().graceful_shutdown(),
    }
    let _ended = connection.await;
}

/// Longest wait for the head of a request, the wait on an idle connection included; what SGLang's
/// own server allows.
const IDLE: Duration = Duration::from_secs(75);

/// Longest head of a request in bytes.
const MAX_HEAD: usize = 64 * 1024;

/// Connections at a time; more wait in the backlog.
const MAX_CONNECTIONS: usize = 4096;

const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
