#include "reader.hpp"

#include <optional>
#include <string>

#include "tokens.hpp"

namespace nb = nanobind;

namespace kvactors {
namespace {

constexpr std::size_t kLong = 32768;  // below this a conversion is over before giving the GIL away would pay

[[noreturn]] void wrong_type(const char* what, nb::handle source) {
    const std::string type = nb::cast<std::string>(nb::str(source.type().attr("__name__")));
    throw nb::type_error((std::string(what) + "s must be integers in a list, tuple or one-dimensional buffer, not " + type).c_str());
}

[[noreturn]] void out_of_range(const char* what) {
    throw nb::value_error((std::string(what) + " out of range: must be from 0 to 2**32 - 1").c_str());
}

u32 one_integer(PyObject* item, const char* what) {
    nb::object number;
    if (!PyLong_CheckExact(item)) {
        if (PyBool_Check(item)) wrong_type(what, item);
        number = nb::steal(PyNumber_Index(item));
        if (!number.is_valid()) {
            PyErr_Clear();
            wrong_type(what, item);
        }
        item = number.ptr();
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || value < 0 || value > 0xffffffffLL) out_of_range(what);
    return u32(value);
}

// The sequence may change under us: __index__ of an item is foreign code.
void read_sequence(nb::handle source, Raw<u32>& out, const char* what) {
    const bool is_list = PyList_Check(source.ptr()) != 0;
    const Py_ssize_t count = is_list ? PyList_Size(source.ptr()) : PyTuple_Size(source.ptr());
    const std::size_t before = out.size();
    out.resize(before + std::size_t(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* at = is_list ? PyList_GetItem(source.ptr(), i) : PyTuple_GetItem(source.ptr(), i);
        if (at == nullptr) throw nb::python_error();
        const nb::object item = nb::borrow(at);
        out[before + std::size_t(i)] = one_integer(item.ptr(), what);
    }
}

std::optional<IntKind> kind_of(const char* format, Py_ssize_t size) {
    if (format == nullptr) return IntKind::u8;
    const bool little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    if (*format == '@' || *format == '=' || *format == (little ? '<' : '>') || (size == 1 && std::strchr("<>!", *format)))
        ++format;
    if (*format == '\0' || format[1] != '\0') return std::nullopt;
    const bool is_signed = std::strchr("bhilqn", *format) != nullptr;
    if (!is_signed && std::strchr("BHILQN", *format) == nullptr) return std::nullopt;
    switch (size) {
        case 1: return is_signed ? IntKind::i8 : IntKind::u8;
        case 2: return is_signed ? IntKind::i16 : IntKind::u16;
        case 4: return is_signed ? IntKind::i32 : IntKind::u32;
        case 8: return is_signed ? IntKind::i64 : IntKind::u64;
        default: return std::nullopt;
    }
}

struct View {
    explicit View(nb::handle source) { ok = PyObject_GetBuffer(source.ptr(), &buffer, PyBUF_FORMAT | PyBUF_STRIDES) == 0; }
    ~View() {
        if (ok) PyBuffer_Release(&buffer);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    Py_buffer buffer;
    bool ok;
};

void read_buffer(nb::handle source, Raw<u32>& out, const char* what) {
    const View view(source);
    if (!view.ok) {
        PyErr_Clear();
        wrong_type(what, source);
    }
    const Py_buffer& buffer = view.buffer;
    const std::optional<IntKind> kind = kind_of(buffer.format, buffer.itemsize);
    if (!kind) wrong_type(what, source);
    if (buffer.ndim != 1) throw nb::value_error((std::string(what) + "s must be one-dimensional").c_str());
    const std::size_t count = std::size_t(buffer.shape[0]), before = out.size();
    out.resize(before + count);
    bool good;
    {
        std::optional<nb::gil_scoped_release> released;
        if (count > kLong) released.emplace();
        good = narrow(*kind, buffer.buf, buffer.strides[0], count, out.data() + before);
    }
    if (!good) out_of_range(what);
}

}  // namespace

void read_integers(nb::handle source, Raw<u32>& out, const char* what) {
    const std::size_t before = out.size();
    try {
        if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr()))
            read_sequence(source, out, what);
        else
            read_buffer(source, out, what);
    } catch (...) {
        out.resize(before);
        throw;
    }
}

}  // namespace kvactors
