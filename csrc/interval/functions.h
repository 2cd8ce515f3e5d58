// The functions of fajit/interval*.h, by the names that statements call them by.
#pragma once

#include <map>
#include <string>

#include "batch.h"

namespace fajit::form {

// How an operation is made of a function. Kinds: i Interval, f FInterval, t Tri, b Bits.
struct Function {
  Operation::Run run;
  std::string operands;  // their kinds
  std::string numbers;   // n: an integer, d: a double
  char result;           // its kind; '?' where it only says which boxes stay
};

using Functions = std::map<std::string, Function>;
const Functions& functions();

}  // namespace fajit::form
