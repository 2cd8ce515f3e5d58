// Exceptions of the runtime. bindings.cpp translates each into a Python exception.
#pragma once

#include <stdexcept>
#include <string>

namespace fajit::runtime {

// Python: AbiError.
struct AbiError : std::runtime_error { using std::runtime_error::runtime_error; };

// Python: OSError.
struct LoadError : std::runtime_error { using std::runtime_error::runtime_error; };

// Python: LaunchError. A kernel could not be loaded or launched.
struct LaunchError : std::runtime_error { using std::runtime_error::runtime_error; };

// Throws for a fajit_status other than FAJIT_OK; `entry` names the entry point that returned it.
void check_status(int status, const char* entry, const std::string& path);

}  // namespace fajit::runtime
