//! Compiles the C++ shim over c10d and libtorch against the libtorch in use; its NCCL part only if
//! NCCL's headers are found.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Headers that the NCCL part includes, directly or not, and that libtorch does not ship.
const NCCL_HEADERS: [&str; 4] = ["nccl.h", "cuda_runtime.h", "crt/host_config.h", "nv/target"];

fn main() {
    println!("cargo::rerun-if-changed=src/cpp");
    println!("cargo::rerun-if-changed=src/cuda");
    for name in ["LIBTORCH", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let Some(libtorch) = env::var_os("LIBTORCH").map(PathBuf::from) else {
        println!(
            "cargo::error=LIBTORCH is not set; run scripts/setup.sh, which prepares .libtorch for the build"
        );
        return;
    };
    println!("cargo::rustc-env=DEEPSPEC_LIBTORCH={}", version(&libtorch));
    let mut shim = cc::Build::new();
    shim.cpp(true).std("c++17").include("src/cpp").file("src/cpp/shim.cpp");
    match gpu_kernels() {
        Ok(folder) => shim.include(folder),
        Err(problem) => {
            println!("cargo::error=src/cuda: {problem}");
            return;
        }
    };
    if env::var_os("CARGO_FEATURE_KERNELS").is_some() {
        shim.define("DEEPSPEC_KERNELS", None);
    }
    // Without these flags the compiler preserves floating-point exceptions and does not vectorise a
    // choice between two values.
    shim.flag("-fno-trapping-math").flag("-fno-math-errno");
    // As system headers, so that their warnings are not shown.
    for include in ["include", "include/torch/csrc/api/include"] {
        shim.flag("-isystem").flag(libtorch.join(include));
    }
    let missing = match nccl_includes(&libtorch) {
        Ok(includes) => {
            for include in &includes {
                shim.flag("-isystem").flag(include);
            }
            shim.define("DEEPSPEC_NCCL", None);
            println!("cargo::rustc-link-search=native={}", libtorch.join("lib").display());
            // Libraries that the NCCL part and its headers call: linkers do not search the
            // dependencies of libraries.
            println!("cargo::rustc-link-lib=torch_cuda");
            println!("cargo::rustc-link-lib=c10_cuda");
            if let Some((folder, name)) = includes.iter().find_map(|include| runtime_beside(include)) {
                println!("cargo::rustc-link-search=native={}", folder.display());
                println!("cargo::rustc-link-lib=dylib:+verbatim={name}");
            }
            String::new()
        }
        Err(missing) => missing,
    };
    println!("cargo::rustc-env=DEEPSPEC_NCCL_MISSING={missing}");
    shim.compile("deepspec_c10d");
}

/// Writes a header with the texts of the GPU kernels, which are compiled at run time. Returns the
/// header's folder.
fn gpu_kernels() -> std::io::Result<PathBuf> {
    let folder = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let mut header = String::from("#pragma once\nnamespace kernels {\n");
    let files = [
        ("kValues", "values"),
        ("kLosses", "losses"),
        ("kAttention", "attention"),
        ("kRows", "rows"),
        ("kDecode", "decode"),
    ];
    for (name, file) in files {
        let text = fs::read_to_string(format!("src/cuda/{file}.cu"))?;
        header.push_str(&format!("constexpr char {name}[] = R\"cuda({text})cuda\";\n"));
    }
    header.push_str("}\n");
    fs::write(folder.join("kernels.h"), header)?;
    Ok(folder)
}

/// The version that libtorch's headers name.
fn version(libtorch: &Path) -> String {
    let header = fs::read_to_string(libtorch.join("include/torch/headeronly/version.h")).unwrap_or_default();
    let part = |name: &str| {
        let words = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
        let line = header.lines().map(words).find(|words| words.get(1).is_some_and(|word| word == name));
        line.and_then(|words| words.get(2).cloned()).unwrap_or_else(|| "?".into())
    };
    ["TORCH_VERSION_MAJOR", "TORCH_VERSION_MINOR", "TORCH_VERSION_PATCH"].map(part).join(".")
}

/// Finds CUDA's runtime library in the library folder next to a folder of headers. Returns the
/// library's folder and file name: wheels have no file without a version in its name.
fn runtime_beside(include: &Path) -> Option<(PathBuf, String)> {
    ["lib", "lib64"].into_iter().find_map(|folder| {
        let folder = include.parent()?.join(folder);
        let names =
            fs::read_dir(&folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        // The shortest name is the one that linkers look for, if it exists.
        let name = names.filter(|name| name.starts_with("libcudart.so")).min_by_key(String::len)?;
        Some((folder, name))
    })
}

/// Returns the include folders with NCCL's headers: in the wheels next to torch, else in a CUDA
/// toolkit. The error says what is missing.
fn nccl_includes(libtorch: &Path) -> Result<Vec<PathBuf>, String> {
    if !libtorch.join("lib/libtorch_cuda.so").exists() {
        return Err("this libtorch is built without CUDA".into());
    }
    let wheels = libtorch.canonicalize().ok().and_then(|real| Some(real.parent()?.join("nvidia")));
    let mut places: Vec<PathBuf> = wheels
        .iter()
        .flat_map(|wheels| {
            ["nccl/include", "cu13/include", "cu13/include/cccl"].map(|place| wheels.join(place))
        })
        .collect();
    let toolkit = env::var_os("CUDA_HOME").map_or_else(|| "/usr/local/cuda".into(), PathBuf::from);
    places.extend([toolkit.join("include"), toolkit.join("include/cccl")]);
    let absent: Vec<&str> = NCCL_HEADERS
        .into_iter()
        .filter(|header| {
            !places.iter().chain([&"/usr/include".into()]).any(|place| place.join(header).exists())
        })
        .collect();
    if absent.is_empty() {
        Ok(places.into_iter().filter(|place| place.is_dir()).collect())
    } else {
        Err(format!("no {} was found when it was built", absent.join(", ")))
    }
}
