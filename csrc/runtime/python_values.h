// Conversions of Python objects, checked, with messages that name the argument; and to them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace fajit::runtime {

// An int (or bool). Throws for other types and for values that do not fit 64 bits.
inline int64_t to_int64(pybind11::handle value, const char* name) {
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    throw pybind11::type_error(std::string(name) + " must hold ints that fit 64 bits, got " +
                               std::string(pybind11::repr(value)));
  }
  return number;
}

// An address from `Tensor.data_ptr()`; 0 is null.
inline void* to_address(pybind11::handle value) {
  void* address = PyLong_AsVoidPtr(value.ptr());
  if (address == nullptr && PyErr_Occurred()) throw pybind11::error_already_set();
  return address;
}

// A view of a tuple or list. A generator or tensor is a TypeError.
class Items {
 public:
  Items(pybind11::handle sequence, const char* name) : sequence_(sequence) {
    if (!PyTuple_Check(sequence.ptr()) && !PyList_Check(sequence.ptr())) {
      throw pybind11::type_error(std::string(name) + " must be a tuple or list, got " +
                                 Py_TYPE(sequence.ptr())->tp_name);
    }
  }
  size_t size() const { return static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence_.ptr())); }
  // A strong reference: code that runs while an item is converted may change the list.
  pybind11::object operator[](size_t i) const {
    if (i >= size()) throw pybind11::value_error("a list changed while it was read");
    return pybind11::reinterpret_borrow<pybind11::object>(
        PySequence_Fast_GET_ITEM(sequence_.ptr(), static_cast<Py_ssize_t>(i)));
  }

 private:
  pybind11::handle sequence_;
};

// A tuple or list of `count` items.
inline Items exactly(pybind11::handle sequence, size_t count, const char* name) {
  const Items items(sequence, name);
  if (items.size() != count) {
    throw pybind11::value_error(std::string(name) + " must have " + std::to_string(count) +
                                " entries, got " + std::to_string(items.size()));
  }
  return items;
}

// `count` ints into `out`.
inline void to_int64s(pybind11::handle sequence, size_t count, int64_t* out, const char* name) {
  const Items items = exactly(sequence, count, name);
  for (size_t i = 0; i < count; ++i) out[i] = to_int64(items[i], name);
}

inline int32_t narrow(int64_t value, const char* name) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw pybind11::value_error(std::string(name) + "=" + std::to_string(value) +
                                " does not fit 32 bits");
  }
  return static_cast<int32_t>(value);
}

// The items' memory, copied.
template <class T>
inline pybind11::bytes to_bytes(const std::vector<T>& items) {
  return pybind11::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

}  // namespace fajit::runtime
