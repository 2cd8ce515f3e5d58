// The attributes of an artifact's entry points, and the beginning of fajit_describe()'s result.
#pragma once
#include <fajit/abi.h>

#define FAJIT_ENTRY extern "C" __attribute__((visibility("default")))

// FAJIT_KEY is prepended to the source, because the key depends on the source.
#define FAJIT_TEXT_OF(x) #x
#define FAJIT_TEXT(x) FAJIT_TEXT_OF(x)
#define FAJIT_DESCRIPTION \
  "{\"abi_version\":" FAJIT_TEXT(FAJIT_ABI_VERSION) ",\"key\":\"" FAJIT_KEY "\""
