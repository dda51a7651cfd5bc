// Events of every shape, run under the address and undefined-behaviour sanitizers. The bytes are
// compared with msgspec's in tests/flush_notifier/test_kv_encoder.py.
#include "events.hpp"
#include "tokens.hpp"

#undef NDEBUG
#include <cassert>
#include <cstdio>

using namespace kvactors;

namespace {

const std::vector<std::string> kMedia{"GPU", std::string(255, 'x')};
const std::string_view kNil("\xc0", 1);

// Sizes around those at which MessagePack's forms change, and buffers without a byte to spare.
void events_stay_in_their_buffers() {
    for (const bool array : {false, true})
        for (const bool whole : {false, true}) {
            const EventEncoder encoder(array, whole, 70'000, kMedia);
            for (const std::size_t count : {0, 1, 15, 16, 65'535, 65'536}) {
                std::vector<Key> hashes(count);
                for (std::size_t i = 0; i < count; ++i) std::memset(hashes[i].bytes, int(i), 32);
                for (const u8 byte : {0, 1, 200, 255}) {
                    const std::vector<u8> tokens(4 * count, byte);
                    Raw<u8> out;
                    encoder.stored(out, hashes.data(), count, count ? hashes.data() : nullptr, tokens.data(), count, 1,
                                   {kNil, kNil, u32(array), array ? kNil : ""});
                    assert(out[0] == (array ? 0x99 : 0x88) && out.back() == 0xc0);
                    const std::size_t before = out.size();
                    encoder.removed(out, hashes.data(), count, 0);
                    assert(out.size() > before && std::memcmp(&out[out.size() - 3], "GPU", 3) == 0);
                }
            }
        }
}

void numbers_are_in_their_shortest_form() {
    const struct {
        u32 value;
        std::size_t size;
        u8 tag;
    } cases[] = {{0, 1, 0},          {127, 1, 127},      {128, 2, 0xcc},      {255, 2, 0xcc},
                 {256, 3, 0xcd},     {65'535, 3, 0xcd},  {65'536, 5, 0xce},   {0xffffffff, 5, 0xce}};
    for (const auto& one : cases) {
        u8 out[8];
        assert(pack_number(one.value, out) == one.size && out[0] == one.tag);
        u32 value = one.size == 1 ? out[0] : 0;
        for (std::size_t i = 1; i < one.size; ++i) value = value << 8 | out[i];
        assert(value == one.value);
    }
}

void batches_begin_with_their_time() {
    for (const std::size_t count : {0, 15, 16, 65'536}) {
        Raw<u8> out;
        begin_batch(out, 1.5, count);
        assert(out[0] == 0x93 && out[1] == 0xcb && out[2] == 0x3f && out[3] == 0xf8);
        assert(out.size() == 10 + (count < 16 ? 1 : count < 65'536 ? 3 : 5));
    }
}

}  // namespace

int main() {
    events_stay_in_their_buffers();
    numbers_are_in_their_shortest_form();
    batches_begin_with_their_time();
    std::puts("ok");
}
