//! Predictions of an exported model in Rust, by the header shoal/predict.h written out by hand.
//!
//!     rustc examples/predict.rs $(shoal-config --rustc) -o predict
//!     ./predict serve/ctr 17 4711

use std::ffi::{c_char, c_int, CStr, CString};
use std::ptr;

#[repr(C)]
struct ShoalError {
    status: c_int,
    example: i64,
    message: [c_char; 488],
}

#[repr(C)]
struct ShoalInfo {
    version: u64,
    kind: [c_char; 32],
    format: [c_char; 16],
    outputs: usize,
    takes_lines: c_int,
    takes_columns: c_int,
}

enum ShoalPredictor {}

#[link(name = "shoal_predict")]
extern "C" {
    fn shoal_open(
        directory: *const c_char,
        options: *const u8,
        predictor: *mut *mut ShoalPredictor,
        error: *mut ShoalError,
    ) -> c_int;
    fn shoal_close(predictor: *mut ShoalPredictor);
    fn shoal_describe(predictor: *const ShoalPredictor, info: *mut ShoalInfo);
    fn shoal_predict_keys(
        predictor: *const ShoalPredictor,
        examples: usize,
        offsets: *const i64,
        keys: *const u64,
        values: *const f32,
        probabilities: *mut f64,
        error: *mut ShoalError,
    ) -> c_int;
}

/// An open export; safe to share between threads, as the header promises.
struct Predictor {
    of: *mut ShoalPredictor,
    outputs: usize,
}

unsafe impl Send for Predictor {}
unsafe impl Sync for Predictor {}

fn check(status: c_int, error: &ShoalError) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_string_lossy().into_owned())
}

impl Predictor {
    fn open(directory: &str) -> Result<Self, String> {
        let path = CString::new(directory).map_err(|error| error.to_string())?;
        let mut of = ptr::null_mut();
        let mut error: ShoalError = unsafe { std::mem::zeroed() };
        check(unsafe { shoal_open(path.as_ptr(), ptr::null(), &mut of, &mut error) }, &error)?;
        let mut info: ShoalInfo = unsafe { std::mem::zeroed() };
        unsafe { shoal_describe(of, &mut info) };
        Ok(Predictor { of, outputs: info.outputs })
    }

    /// The probabilities of one example whose values are all 1.
    fn predict(&self, keys: &[u64]) -> Result<Vec<f64>, String> {
        let offsets = [0i64, keys.len() as i64];
        let mut probabilities = vec![0.0; self.outputs];
        let mut error: ShoalError = unsafe { std::mem::zeroed() };
        let status = unsafe {
            shoal_predict_keys(
                self.of,
                1,
                offsets.as_ptr(),
                keys.as_ptr(),
                ptr::null(),
                probabilities.as_mut_ptr(),
                &mut error,
            )
        };
        check(status, &error)?;
        Ok(probabilities)
    }
}

impl Drop for Predictor {
    fn drop(&mut self) {
        unsafe { shoal_close(self.of) };
    }
}

fn main() -> Result<(), String> {
    let words: Vec<String> = std::env::args().collect();
    if words.len() < 2 {
        return Err(format!("usage: {} EXPORT [KEY ...]", words[0]));
    }
    let model = Predictor::open(&words[1])?;
    let keys: Result<Vec<u64>, _> = words[2..].iter().map(|word| word.parse::<u64>()).collect();
    for probability in model.predict(&keys.map_err(|error| error.to_string())?)? {
        println!("{probability}");
    }
    Ok(())
}
