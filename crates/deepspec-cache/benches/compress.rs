//! What lossless compression of real bfloat16 states would save, and how fast it would be read.
//!
//! ```sh
//! DEEPSPEC_CACHE=DIR cargo bench -p deepspec-cache --bench compress
//! ```
//! Each sample's states are cut into their high bytes (sign and exponent) and low bytes (mantissa), and each plane is
//! compressed by zstd alone. One core.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use deepspec_cache::Reader;

fn main() -> io::Result<()> {
    let Some(dir) = std::env::var_os("DEEPSPEC_CACHE").map(PathBuf::from) else {
        return writeln!(io::stdout(), "DEEPSPEC_CACHE names no cache");
    };
    let reader = Reader::open(&dir).map_err(io::Error::other)?;
    for level in 1..=3 {
        let (mut plain, mut planes, mut seconds) = ([0_usize; 2], [0_usize; 2], 0.0);
        for index in 0..reader.len() {
            let sample = reader.sample(index).map_err(io::Error::other)?;
            for (states, plain) in sample.states().iter().zip(&mut plain) {
                let [low, high]: [Vec<u8>; 2] =
                    [0, 1].map(|plane| states.iter().copied().skip(plane).step_by(2).collect());
                *plain += states.len();
                let packed = [zstd::bulk::compress(&low, level)?, zstd::bulk::compress(&high, level)?];
                planes.iter_mut().zip(&packed).for_each(|(sum, packed)| *sum += packed.len());
                let mut joined = vec![0; states.len()];
                let began = Instant::now();
                let low = zstd::bulk::decompress(&packed[0], low.len())?;
                let high = zstd::bulk::decompress(&packed[1], high.len())?;
                for (pair, (low, high)) in joined.as_chunks_mut::<2>().0.iter_mut().zip(low.iter().zip(&high))
                {
                    *pair = [*low, *high];
                }
                seconds += began.elapsed().as_secs_f64();
                assert!(joined == states[..], "the planes give the states back");
            }
        }
        let total = plain[0] + plain[1];
        writeln!(
            io::stdout(),
            "zstd {level}: {} of {total} bytes, {:.1} % saved (mantissas {:.1} %, exponents {:.1} %), read at {:.2} GB/s a core",
            planes[0] + planes[1],
            100.0 - (planes[0] + planes[1]) as f64 / total as f64 * 100.0,
            100.0 - planes[0] as f64 / (total / 2) as f64 * 100.0,
            100.0 - planes[1] as f64 / (total / 2) as f64 * 100.0,
            total as f64 / seconds / 1e9
        )?;
    }
    Ok(())
}
