// What the entry points of an artifact are declared with, and how fajit_describe() begins.
#pragma once
#include <fajit/abi.h>

#define FAJIT_ENTRY extern "C" __attribute__((visibility("default")))

// FAJIT_KEY is defined in front of the source, which does not know its own key.
#define FAJIT_TEXT_OF(x) #x
#define FAJIT_TEXT(x) FAJIT_TEXT_OF(x)
#define FAJIT_DESCRIPTION \
  "{\"abi_version\":" FAJIT_TEXT(FAJIT_ABI_VERSION) ",\"key\":\"" FAJIT_KEY "\""
