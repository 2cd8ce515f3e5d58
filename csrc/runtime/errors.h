// What the runtime throws. bindings.cpp turns each into the Python class of
// flashattn_jit/errors.py.
#pragma once

#include <stdexcept>
#include <string>

namespace fajit::runtime {

// Python: AbiError.
struct AbiError : std::runtime_error { using std::runtime_error::runtime_error; };

// Python: OSError.
struct LoadError : std::runtime_error { using std::runtime_error::runtime_error; };

// Python: LaunchError. CUDA refused to load or to launch a kernel.
struct LaunchError : std::runtime_error { using std::runtime_error::runtime_error; };

// Throws for a fajit_status other than FAJIT_OK; `entry` names the entry point that returned it.
void check_status(int status, const char* entry, const std::string& path);

}  // namespace fajit::runtime
