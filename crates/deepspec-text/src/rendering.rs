//! Renders templates on a separate thread, with a time limit. A thread that exceeds it is
//! abandoned.
//!
//! The template engine limits the number of instructions, but a single instruction may copy or
//! compare gigabytes.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use minijinja::{Environment, Error, ErrorKind, Value};

/// Largest width of an indent or a format; a larger one is a mistake that costs gigabytes.
pub(crate) const MAX_WIDTH: i64 = 1000;

/// Interval between checks of the thread's processor time.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Limit on the processor time of a rendering, counted from the first check.
const TIME_LIMIT: Duration = Duration::from_millis(600);

/// A template to render.
struct RenderJob {
    environment: Arc<Environment<'static>>,
    template: &'static str,
    context: Value,
}

/// A thread that renders on behalf of one caller thread.
struct RenderThread {
    jobs: Sender<RenderJob>,
    rendered: Receiver<Result<String, Error>>,
    /// Linux's file with the thread's processor time; None elsewhere.
    place: Option<PathBuf>,
}

thread_local! {
    static RENDER_THREAD: RefCell<Option<RenderThread>> = const { RefCell::new(None) };
}

/// The error of a width above [`MAX_WIDTH`].
pub(crate) fn too_wide_error(width: i64) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a width of {width}; at most {MAX_WIDTH} is written"))
}

/// Renders the template with this name.
///
/// # Errors
/// If rendering fails, or with [`ErrorKind::OutOfFuel`] if it takes too long.
pub fn render(
    environment: &Arc<Environment<'static>>,
    template: &'static str,
    context: Value,
) -> Result<String, Error> {
    RENDER_THREAD.with_borrow_mut(|slot| {
        let worker = match slot.take() {
            Some(worker) => worker,
            None => RenderThread::start()?,
        };
        let rendered =
            worker.render(RenderJob { environment: Arc::clone(environment), template, context })?;
        // Keeps the worker only if it finished.
        *slot = Some(worker);
        rendered
    })
}

impl RenderThread {
    fn start() -> Result<Self, Error> {
        let (jobs, waiting) = mpsc::channel::<RenderJob>();
        let (sender, rendered) = mpsc::channel();
        let (named, place) = mpsc::channel();
        let work = move || {
            let _ = named.send(fs::read_link("/proc/thread-self").ok());
            for RenderJob { environment, template, context } in waiting {
                let template = environment.get_template(template);
                if sender.send(template.and_then(|template| template.render(context))).is_err() {
                    return;
                }
            }
        };
        let failed = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
        thread::Builder::new()
            .name("template".into())
            .spawn(work)
            .map_err(|error| failed(format!("no thread to render on: {error}")))?;
        let place = place.recv().ok().flatten().map(|own| Path::new("/proc").join(own).join("schedstat"));
        Ok(Self { jobs, rendered, place })
    }

    /// The result of a job. The outer error means that the worker returned no result and must be
    /// dropped.
    fn render(&self, job: RenderJob) -> Result<Result<String, Error>, Error> {
        let gone = || Error::new(ErrorKind::InvalidOperation, "the rendering broke off");
        self.jobs.send(job).map_err(|_| gone())?;
        let mut first = None;
        loop {
            match self.rendered.recv_timeout(POLL_INTERVAL) {
                Ok(rendered) => return Ok(rendered),
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => {
                    let Some(taken) = self.cpu_time() else { continue };
                    if taken.saturating_sub(*first.get_or_insert(taken)) > TIME_LIMIT {
                        return Err(ErrorKind::OutOfFuel.into());
                    }
                }
            }
        }
    }

    /// Processor time of the thread since its start.
    fn cpu_time(&self) -> Option<Duration> {
        let text = fs::read_to_string(self.place.as_ref()?).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    }
}
