// The Python module: the encoder of KV events.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "events.hpp"
#include "rows.hpp"
#include "module.hpp"

namespace kvactors {

namespace {

constexpr std::size_t kLargeScratch = std::size_t(1) << 20;

// What `write` appends, as bytes. The buffer is kept for the next call unless it is large. `write` may
// call Python, and Python this function.
template <class Write>
nb::bytes written(Write write) {
    thread_local Raw<u8> spare;
    Raw<u8> out = std::move(spare);
    out.clear();
    write(out);
    const nb::bytes result = bytes_of(out.data(), out.size());
    if (out.capacity() <= kLargeScratch) spare = std::move(out);
    return result;
}

void append(Raw<u8>& out, std::string_view bytes) {
    const std::size_t before = out.size();
    out.resize(before + bytes.size());
    std::memcpy(out.data() + before, bytes.data(), bytes.size());
}

// The names of a FlushTask's fields, interned once.
struct TaskFields {
    static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
    nb::object count = name("count"), residency = name("residency"), hashes = name("hashes"), parent = name("parent"),
               start = name("start_block_idx"), tokens = name("tokens"), tier = name("tier"), scope = name("scope"),
               extra_keys = name("extra_keys");
};

nb::object field(nb::handle task, const nb::object& name) {
    PyObject* value = PyObject_GetAttr(task.ptr(), name.ptr());
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
}

Id number_of(const nb::object& value) {
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) throw nb::python_error();
    return number;
}

nb::bytes bytes_field(nb::handle task, const nb::object& name) { return nb::cast<nb::bytes>(field(task, name)); }

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

const Key* keys_of(const nb::bytes& hashes) {
    if (hashes.size() % sizeof(Key)) throw nb::value_error("hashes must be 32 bytes each");
    return reinterpret_cast<const Key*>(hashes.c_str());
}

// The encoder with what every event without an adapter, a salt or media has, and the end of every
// batch.
struct PyEventEncoder : EventEncoder {
    PyEventEncoder(bool array, bool whole_hashes, u32 block_size, const std::vector<std::string>& media, u32 num_nil,
                   const nb::bytes& dp_rank, nb::object resident, nb::object plain)
        : EventEncoder(array, whole_hashes, block_size, media), nil(num_nil, '\xc0'), rank(view_of(dp_rank)),
          resident(std::move(resident)), plain(std::move(plain)) {}

    EventIdentity no_identity() const {
        static constexpr std::string_view kNil("\xc0", 1);
        return {kNil, kNil, u32(nil.size()), nil};
    }

    std::size_t medium(nb::handle tier) const {
        const long bit = PyLong_AsLong(tier.ptr());  // of an enum too, which a cast to int converts
        if (bit == -1 && PyErr_Occurred()) throw nb::python_error();
        for (std::size_t i = 0; i < num_media(); ++i)
            if (bit == 1L << i) return i;
        throw nb::value_error("tier must be one tier");
    }

    std::string nil;   // fields that are always there
    std::string rank;  // encoded
    nb::object resident, plain;  // the residency of a gain, and the scope without an identity
    TaskFields fields;
};

void write_stored(const PyEventEncoder& e, Raw<u8>& out, const nb::bytes& hashes, const nb::bytes& parent,
                  const nb::bytes& tokens, nb::handle tier, const EventIdentity& identity) {
    const Key* keys = keys_of(hashes);
    if (parent.size() != 0 && parent.size() != sizeof(Key)) throw nb::value_error("parent must be 32 bytes, or none");
    if (tokens.size() % 4) throw nb::value_error("tokens must be whole little-endian uint32");
    const Key* above = parent.size() ? reinterpret_cast<const Key*>(parent.c_str()) : nullptr;
    const u8* ids = reinterpret_cast<const u8*>(tokens.c_str());
    e.stored(out, keys, hashes.size() / sizeof(Key), above, ids, tokens.size() / 4, e.medium(tier), identity);
}

void write_removed(const PyEventEncoder& e, Raw<u8>& out, const nb::bytes& hashes, nb::handle tier) {
    const Key* keys = keys_of(hashes);
    e.removed(out, keys, hashes.size() / sizeof(Key), e.medium(tier));
}

// A task as one event. Those that this encoder has no form for are encoded by `event`.
void write_task(const PyEventEncoder& e, Raw<u8>& out, nb::handle task, const nb::callable& event) {
    const TaskFields& f = e.fields;
    if (field(task, f.residency).is(e.resident)) {
        const nb::object extra_keys = field(task, f.extra_keys);
        if (field(task, f.scope).is(e.plain) && PyObject_IsTrue(extra_keys.ptr()) == 0) {
            const nb::bytes above = number_of(field(task, f.start)) ? bytes_field(task, f.parent) : nb::bytes("", 0);
            write_stored(e, out, bytes_field(task, f.hashes), above, bytes_field(task, f.tokens), field(task, f.tier),
                         e.no_identity());
            return;
        }
    } else if (number_of(field(task, f.count))) {
        write_removed(e, out, bytes_field(task, f.hashes), field(task, f.tier));
        return;
    }
    append(out, view_of(nb::cast<nb::bytes>(event(task))));
}

// None if the tasks have more blocks than one batch takes, and if there are none.
nb::object batch_of_tasks(const PyEventEncoder& e, double timestamp, nb::handle tasks, Id max_blocks,
                          const nb::callable& event) {
    const nb::object whole = nb::steal(PySequence_Tuple(tasks.ptr()));
    if (!whole.is_valid()) throw nb::python_error();
    const nb::tuple sequence = nb::borrow<nb::tuple>(whole);
    Id blocks = 0;
    for (nb::handle task : sequence) blocks += number_of(field(task, e.fields.count));
    if (blocks > max_blocks || sequence.size() == 0) return nb::none();
    return written([&](Raw<u8>& out) {
        begin_batch(out, timestamp, sequence.size());
        for (nb::handle task : sequence) write_task(e, out, task, event);
        append(out, e.rank);
    });
}

nb::bytes batch(const PyEventEncoder& e, double timestamp, const nb::list& events) {
    return written([&](Raw<u8>& out) {
        begin_batch(out, timestamp, events.size());
        for (nb::handle event : events) append(out, view_of(nb::cast<nb::bytes>(event)));
        append(out, e.rank);
    });
}

// Sends messages of three frames through zmq_send of the library that has opened the socket. pyzmq's
// `send` costs more for one frame than zmq_send for all three.
struct FrameSender {
    using Send = int (*)(void* socket, const void* frame, std::size_t size, int flags);
    static constexpr int kMore = 2;  // ZMQ_SNDMORE

    void call(const nb::bytes& topic, u64 number, const nb::bytes& payload) const {
        u8 bytes[8];
        for (int i = 0; i < 8; ++i) bytes[i] = u8(number >> (56 - 8 * i));
        const bool sent = send != nullptr && send(socket, topic.c_str(), topic.size(), kMore) >= 0 &&
                          send(socket, bytes, sizeof bytes, kMore) >= 0 &&
                          send(socket, payload.c_str(), payload.size(), 0) >= 0;
        if (!sent) fail();
    }

    Send send;
    void* socket;
    nb::object fail;  // raises the error of the last call
};

// The bytes of some rows, joined. fill: writes those of one row.
template <class Fill>
nb::bytes joined(const nb::list& rows, std::size_t size, Fill fill) {
    nb::object whole = nb::steal(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(rows.size() * size)));
    if (!whole.is_valid()) throw nb::python_error();
    u8* at = reinterpret_cast<u8*>(PyBytes_AsString(whole.ptr()));
    for (nb::handle row : rows) {
        fill(nb::cast<u32>(row), at);
        at += size;
    }
    return nb::borrow<nb::bytes>(whole);
}

}  // namespace

void bind_events(nb::module_& m) {
    nb::class_<BlockRows>(m, "BlockRows")
        .def("__init__", [](BlockRows* self, Id token_bytes) {
            new (self) BlockRows(size_of(token_bytes, "token_bytes out of range"));
        }, "token_bytes"_a)
        .def("__len__", &BlockRows::used)
        .def("find", [](const BlockRows& rows, const nb::bytes& hash) {
            return rows.find(key_of(hash, "a block hash has 32 bytes"));
        }, "block_hash"_a)
        .def("put", [](BlockRows& rows, u32 row, const nb::bytes& hash, const nb::bytes& tokens) {
            if (tokens.size() != rows.token_bytes()) throw nb::value_error("tokens of another block size");
            rows.put(row, key_of(hash, "a block hash has 32 bytes"), reinterpret_cast<const u8*>(tokens.c_str()));
        }, "row"_a, "block_hash"_a, "tokens"_a)
        .def("erase", [](BlockRows& rows, u32 row) {
            if (!rows.holds(row)) throw nb::value_error("no such row");
            rows.erase(row);
        }, "row"_a)
        .def("hash", [](const BlockRows& rows, u32 row) { return bytes_of(rows.hash(row), 32); }, "row"_a)
        .def("hashes_of", [](const BlockRows& rows, const nb::list& some) {
            return joined(some, 32, [&](u32 row, u8* out) { std::memcpy(out, rows.hash(row), 32); });
        }, "rows"_a)
        .def("tokens_of", [](const BlockRows& rows, const nb::list& some) {
            return joined(some, rows.token_bytes(), [&](u32 row, u8* out) { rows.tokens(row, out); });
        }, "rows"_a);
    nb::class_<PyEventEncoder>(m, "EventEncoder")
        .def("__init__", [](PyEventEncoder* self, bool array, bool whole_hashes, Id block_size,
                            const std::vector<std::string>& media, Id num_nil, const nb::bytes& dp_rank,
                            nb::object resident, nb::object plain) {
            if (num_nil < 0 || num_nil > 7) throw nb::value_error("num_nil must be between 0 and 7");
            for (const std::string& medium : media)
                if (medium.size() > 255) throw nb::value_error("the name of a medium is too long");
            new (self) PyEventEncoder(array, whole_hashes, size_of(block_size, "block_size out of range"), media,
                                      u32(num_nil), dp_rank, std::move(resident), std::move(plain));
        }, "array"_a, "whole_hashes"_a, "block_size"_a, "media"_a, "num_nil"_a, "dp_rank"_a, "resident"_a, "plain"_a)
        .def("stored", [](const PyEventEncoder& e, const nb::bytes& hashes, const nb::bytes& parent,
                          const nb::bytes& tokens, nb::handle tier) {
            return written([&](Raw<u8>& out) { write_stored(e, out, hashes, parent, tokens, tier, e.no_identity()); });
        }, "hashes"_a, "parent"_a, "tokens"_a, "tier"_a)
        .def("stored_with", [](const PyEventEncoder& e, const nb::bytes& hashes, const nb::bytes& parent,
                               const nb::bytes& tokens, nb::handle tier, const nb::bytes& lora_id,
                               const nb::bytes& lora_name, Id num_fields, const nb::bytes& fields) {
            if (num_fields < 0 || num_fields > 7) throw nb::value_error("num_fields must be between 0 and 7");
            const EventIdentity identity{view_of(lora_id), view_of(lora_name), u32(num_fields), view_of(fields)};
            return written([&](Raw<u8>& out) { write_stored(e, out, hashes, parent, tokens, tier, identity); });
        }, "hashes"_a, "parent"_a, "tokens"_a, "tier"_a, "lora_id"_a, "lora_name"_a, "num_fields"_a, "fields"_a)
        .def("removed", [](const PyEventEncoder& e, const nb::bytes& hashes, nb::handle tier) {
            return written([&](Raw<u8>& out) { write_removed(e, out, hashes, tier); });
        }, "hashes"_a, "tier"_a)
        .def("batch", &batch, "timestamp"_a, "events"_a)
        .def("batch_of_tasks", &batch_of_tasks, "timestamp"_a, "tasks"_a, "max_blocks"_a, "event"_a);
    nb::class_<FrameSender>(m, "FrameSender")
        .def("__init__", [](FrameSender* self, std::uintptr_t send, std::uintptr_t socket, nb::object fail) {
            if (send == 0 || socket == 0) throw nb::value_error("send and socket must be addresses");
            new (self) FrameSender{reinterpret_cast<FrameSender::Send>(send), reinterpret_cast<void*>(socket), std::move(fail)};
        }, "send"_a, "socket"_a, "fail"_a)
        .def("__call__", &FrameSender::call, "topic"_a, "number"_a, "payload"_a)
        .def("close", [](FrameSender& sender) { sender.send = nullptr; });
}

}  // namespace kvactors
