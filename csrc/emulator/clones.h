// FAJIT_CLONES: the function is compiled for FMA machines too, and the loader picks. The rest of the
// emulator is plain x86-64, so that a wheel runs anywhere.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FAJIT_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define FAJIT_CLONES
#endif
