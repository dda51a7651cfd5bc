// An array of zeros whose memory the kernel provides on first access, so that creating a large one
// costs nothing.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "common.hpp"

namespace kvactors {

constexpr std::size_t kHugePage = std::size_t(2) << 20;

// Zeros from the kernel, nullptr if it has none left. huge: in huge pages where the system has them,
// which `bytes` must fill. Freed with munmap, so that nothing of it stays resident.
inline void* map_zeros(std::size_t bytes, bool huge) {
    const std::size_t more = huge ? kHugePage : 0;
    void* memory = ::mmap(nullptr, bytes + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    if (!huge) return memory;
    // The part that begins at a huge page.
    char* const start = static_cast<char*>(memory);
    const std::size_t skipped = -reinterpret_cast<std::uintptr_t>(start) % kHugePage;
    if (skipped != 0) ::munmap(start, skipped);
    if (skipped != more) ::munmap(start + skipped + bytes, more - skipped);
    ::madvise(start + skipped, bytes, MADV_HUGEPAGE);
    return start + skipped;
}

// Brings in the pages of a mapping now, and not in the turn of an actor: the first access to a huge page
// takes as long as clearing 2 MiB, and on a virtual machine whose host lacks that memory 10 ms and more.
inline void bring_in(void* memory, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
    if (::madvise(memory, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
    std::memset(memory, 0, bytes);
}

// Memory for a std::vector. Large arrays are mapped, and their memory is used as it is needed.
// huge: in huge pages where the system has them.
template <class T>
struct Mapped {
    using value_type = T;
    bool huge = false;

    explicit Mapped(bool in_huge_pages) : huge(in_huge_pages) {}
    template <class U>
    Mapped(const Mapped<U>& other) : huge(other.huge) {}

    T* allocate(std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        void* memory = bytes < kHugePage ? std::aligned_alloc(64, bytes + 63 & ~std::size_t(63)) : map_zeros(whole(bytes), huge);
        if (memory == nullptr) throw std::bad_alloc();
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        if (bytes < kHugePage) std::free(memory);
        else ::munmap(memory, whole(bytes));
    }
    friend bool operator==(const Mapped&, const Mapped&) { return true; }
    friend bool operator!=(const Mapped&, const Mapped&) { return false; }

private:
    static std::size_t whole(std::size_t bytes) { return bytes + kHugePage - 1 & ~(kHugePage - 1); }
};

template <class T>
class Zeroed {
public:
    Zeroed() = default;
    // huge: ask for huge pages. Each is cleared as a whole on first access.
    explicit Zeroed(std::size_t size, bool huge = false) : size_(size) {
        if (is_mapped()) {
            items_ = static_cast<T*>(map_zeros(bytes(), huge && bytes() % kHugePage == 0));
        } else {
            items_ = static_cast<T*>(std::calloc(size_ + 1, sizeof(T)));
        }
        if (items_ == nullptr) throw std::bad_alloc();
    }
    Zeroed(const Zeroed&) = delete;
    Zeroed& operator=(const Zeroed&) = delete;
    Zeroed& operator=(Zeroed&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Zeroed() {
        if (items_ == nullptr) return;
        if (is_mapped()) ::munmap(items_, bytes());
        else std::free(items_);
    }

    void swap(Zeroed& other) noexcept {
        std::swap(size_, other.size_);
        std::swap(items_, other.items_);
    }
    void touch() {
        if (size_ != 0) std::memset(static_cast<void*>(items_), 0, bytes());
    }

    T& operator[](std::size_t i) { return items_[i]; }
    const T& operator[](std::size_t i) const { return items_[i]; }
    std::size_t size() const { return size_; }

private:
    std::size_t bytes() const { return size_ * sizeof(T); }
    // The allocator may return used memory and clear it, so large arrays are mapped.
    bool is_mapped() const { return bytes() >= std::size_t(1) << 20; }

    std::size_t size_ = 0;
    T* items_ = nullptr;
};

}  // namespace kvactors
