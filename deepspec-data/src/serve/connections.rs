//! Connections, none of which may keep the server waiting for ever.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep};

use super::Phase;

/// Pause when no connection can be taken, as for want of file descriptors, which other connections give back.
const PAUSE: Duration = Duration::from_secs(1);

/// Answers connections until the server is told to stop, and then those that are there to their end. A client has
/// `patience` for the head of a request, and for reading any of an answer that fills the socket.
pub async fn serve(listener: TcpListener, router: Router, patience: Duration, phase: watch::Receiver<Phase>) {
    let mut connections = JoinSet::new();
    let mut stopped = pin!(super::reaches(phase.clone(), Phase::Draining));
    loop {
        tokio::select! {
            () = &mut stopped => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(answer(stream, router.clone(), patience, phase.clone()))),
                Err(error) if is_the_clients(&error) => {}
                Err(error) => {
                    tracing::warn!("cannot take a connection: {error}");
                    sleep(PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    // From now on nobody connects in vain.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Whether a connection went away before it was taken.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Answers the requests of one connection.
async fn answer(stream: TcpStream, router: Router, patience: Duration, phase: watch::Receiver<Phase>) {
    // Without it a streamed token may wait for the acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("no TCP_NODELAY: {error}");
    }
    let stream = TokioIo::new(Impatient::new(stream, patience));
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .serve_connection(stream, TowerToHyperService::new(router))
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = super::reaches(phase, Phase::Draining) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a connection ended: {error}");
    }
}

/// A stream on which writing fails once nobody has read for so long.
struct Impatient<S> {
    stream: S,
    patience: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, stalled: None }
    }

    fn judge<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    #[tokio::test]
    async fn writing_to_a_reader_who_never_reads_ends() {
        let (mut reader, writer) = duplex(64);
        let mut writer = Impatient::new(writer, Duration::from_millis(20));
        writer.write_all(&[0; 64]).await.unwrap();
        let stalled = writer.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::TimedOut);

        // Whoever reads at last is written to again.
        let mut read = [0; 64];
        reader.read_exact(&mut read).await.unwrap();
        writer.write_all(&[1; 64]).await.unwrap();
        reader.read_exact(&mut read).await.unwrap();
        assert_eq!(read, [1; 64]);
    }
}
