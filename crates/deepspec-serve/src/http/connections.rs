//! Accepts connections, with timeouts so that no client can block the server forever.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tokio_io_timeout::TimeoutStream;

use super::routes::Limits;

/// Pause after a failed accept, such as for lack of file descriptors, until other connections
/// close.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Serves connections until `stopped`, then finishes the open ones. `limits` set a timeout for a
/// request's head and for each write of an answer. Connections beyond the limit wait.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stopped: impl Future<Output = ()>) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(limits.client_timeout);
    let free = Arc::new(Semaphore::new(limits.connections));
    let connections = GracefulShutdown::new();
    let mut stopped = pin!(stopped);
    loop {
        let taken = async {
            let permit = Arc::clone(&free).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            () = &mut stopped => break,
            taken = taken => taken,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if is_client_abort(&error) => continue,
            Err(error) => {
                tracing::warn!("cannot take a connection: {error}");
                sleep(ACCEPT_RETRY_PAUSE).await;
                continue;
            }
        };
        // Without TCP_NODELAY, a streamed token may wait for the acknowledgement of the previous
        // one.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("no TCP_NODELAY: {error}");
        }
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(limits.client_timeout));
        let service = TowerToHyperService::new(router.clone());
        let connection = server.serve_connection(Box::pin(TokioIo::new(stream)), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(error) = connection.await {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
    // New connections are refused from here on.
    drop(listener);
    connections.shutdown().await;
}

/// Whether the client closed the connection before it was accepted.
fn is_client_abort(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
