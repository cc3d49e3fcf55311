//! Renderings that come to an end: on a thread of their own, which is left alone once it has taken too long.
//!
//! The template engine counts its instructions, but a single one may copy or compare gigabytes.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use minijinja::{Environment, Error, ErrorKind, Value};

/// Blanks that filters may write before a line or a value: more is a mistake that costs gigabytes.
pub(crate) const WIDEST: i64 = 1000;

/// How long is waited before the thread's own time is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Processor time that a rendering may take from the first look on.
const MOST: Duration = Duration::from_millis(600);

/// A template to render.
struct Job {
    environment: Arc<Environment<'static>>,
    template: &'static str,
    context: Value,
}

/// A thread that renders for one other.
struct Worker {
    jobs: Sender<Job>,
    rendered: Receiver<Result<String, Error>>,
    /// Where Linux says how long the thread has run; None elsewhere.
    place: Option<PathBuf>,
}

thread_local! {
    static WORKER: RefCell<Option<Worker>> = const { RefCell::new(None) };
}

/// The error of a wider one.
pub(crate) fn too_wide(width: i64) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a width of {width}; at most {WIDEST} is written"))
}

/// Renders the template of this name.
///
/// # Errors
/// As rendering does; [`ErrorKind::OutOfFuel`] for one that takes too long.
pub fn render(
    environment: &Arc<Environment<'static>>,
    template: &'static str,
    context: Value,
) -> Result<String, Error> {
    WORKER.with_borrow_mut(|slot| {
        let worker = match slot.take() {
            Some(worker) => worker,
            None => Worker::start()?,
        };
        let rendered = worker.render(Job { environment: Arc::clone(environment), template, context })?;
        // Only one that is done goes on.
        *slot = Some(worker);
        rendered
    })
}

impl Worker {
    fn start() -> Result<Self, Error> {
        let (jobs, waiting) = mpsc::channel::<Job>();
        let (sender, rendered) = mpsc::channel();
        let (named, place) = mpsc::channel();
        let work = move || {
            let _ = named.send(fs::read_link("/proc/thread-self").ok());
            for Job { environment, template, context } in waiting {
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

    /// What came of a job; an error of its own where nothing did, and the worker is of no more use.
    fn render(&self, job: Job) -> Result<Result<String, Error>, Error> {
        let gone = || Error::new(ErrorKind::InvalidOperation, "the rendering broke off");
        self.jobs.send(job).map_err(|_| gone())?;
        let mut first = None;
        loop {
            match self.rendered.recv_timeout(LOOK_EVERY) {
                Ok(rendered) => return Ok(rendered),
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => {
                    let Some(taken) = self.taken() else { continue };
                    if taken.saturating_sub(*first.get_or_insert(taken)) > MOST {
                        return Err(ErrorKind::OutOfFuel.into());
                    }
                }
            }
        }
    }

    /// Processor time that the thread has taken since it began.
    fn taken(&self) -> Option<Duration> {
        let text = fs::read_to_string(self.place.as_ref()?).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    }
}
