#include "policy/admission.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/noise.h"

namespace shoal {

using Kind = Admission::Kind;

AdmissionConfig::AdmissionConfig(const Admission& rule, Slots slots)
    : rule_(rule),
      slots_(slots),
      counter_(OccurrenceCounter::kRowBytes, slots),
      no_chunks_(OccurrenceCounter::kRowBytes) {
  SHOAL_CHECK(rule.kind != Kind::kCount || rule.capacity == 0 || rule.capacity >= slots.count(),
              "AfterCount needs a capacity of at least one key a slot, " + std::to_string(slots.count()) +
                  ", got " + std::to_string(rule.capacity) +
                  ": raise it, or make the store with fewer slots");
  if (rule.kind == Kind::kBloom) {
    bloom_.emplace(rule);
  }
}

std::size_t AdmissionConfig::max_counted(Slot slot) const noexcept {
  return rule_.capacity == 0 ? std::numeric_limits<std::size_t>::max()
                             : share_of(rule_.capacity, slots_, slot);
}

AdmissionFilter::AdmissionFilter(const AdmissionConfig& config, Slot slot)
    : admission_(&config), slot_(slot) {
  if (config.bloom() != nullptr) {
    bloom_.emplace(*config.bloom(), config.slots(), slot, config.rule().n, config.rule().within);
  }
}

std::size_t AdmissionFilter::bytes() const noexcept {
  return (counter_ ? sizeof(OccurrenceCounter) + counter_->bytes() : 0) + (bloom_ ? bloom_->bytes() : 0);
}

std::size_t AdmissionFilter::least_bytes() const noexcept {
  return bloom_ ? admission_->bloom()->slot_bytes(admission_->slots()) : bytes();
}

void AdmissionFilter::make_room(std::size_t more, std::size_t bytes) {
  const Admission& rule = admission_->rule();
  if (rule.kind == Kind::kCount && rule.n > 1) {
    if (!counter_ && bytes > sizeof(OccurrenceCounter)) {
      counter_ =
          std::make_unique<OccurrenceCounter>(admission_->counter_layout(), slot_, admission_->no_chunks(),
                                              rule.n, rule.within, admission_->max_counted(slot_));
      watch();
    }
    if (counter_) {
      counter_->make_room(more, bytes - std::min(bytes, sizeof(OccurrenceCounter)));
    }
  } else if (bloom_) {
    bloom_->make_room();
  }
}

void AdmissionFilter::prefetch(std::uint64_t hash) const noexcept {
  if (counter_) {
    counter_->prefetch(hash);
  } else if (bloom_) {
    bloom_->prefetch(hash);
  }
}

bool AdmissionFilter::ask(std::uint64_t hash, std::uint32_t count, const PushTime& now) noexcept {
  const Admission& rule = admission_->rule();
  switch (rule.kind) {
    case Kind::kCount:
      return counter_ ? counter_->ask(hash, count, now.clock) : count >= rule.n;
    case Kind::kBloom:
      return bloom_->ask(hash, count, now.clock);
    case Kind::kProbability: {
      // 53 bits: both sides of the comparison are exact.
      const std::uint64_t shared = step_noise(rule.seed, now.step) ^ hash;
      for (std::uint32_t j = 0; j < count; ++j) {
        if (static_cast<double>(mix(shared + j) >> 11U) * 0x1p-53 < rule.probability) {
          return true;
        }
      }
      return false;
    }
    case Kind::kAll:
      break;
  }
  return true;
}

void AdmissionFilter::forget(std::uint64_t hash) noexcept {
  if (counter_) {
    counter_->forget(hash);
  }
}

std::size_t AdmissionFilter::sweep(std::uint32_t clock) {
  if (bloom_) {
    bloom_->sweep(clock);
  }
  return counter_ ? counter_->sweep(clock) : 0;
}

void AdmissionFilter::clear() noexcept {
  counter_.reset();
  if (bloom_) {
    bloom_.emplace(*admission_->bloom(), admission_->slots(), slot_, admission_->rule().n,
                   admission_->rule().within);
  }
}

void AdmissionFilter::save(std::vector<std::byte>& bytes) const {
  bytes.clear();
  if (counter_) {
    counter_->save(bytes);
  } else if (bloom_) {
    bloom_->save(bytes);
  }
}

void AdmissionFilter::restore(Slots cut, Slot slot, std::span<const std::byte> bytes) {
  if (bytes.empty()) {
    return;
  }
  const auto wrong = [&] {
    return "the waiting keys of a slot are not " + std::to_string(bytes.size()) +
           " bytes long in a table with this admission rule";
  };
  if (bloom_) {
    SHOAL_CHECK(bytes.size() == Bloom::kHead + admission_->bloom()->slot_bytes(cut), wrong());
    bloom_->make_room();
    bloom_->restore(cut, slot, bytes);
    return;
  }
  SHOAL_CHECK(admission_->rule().kind == Kind::kCount && OccurrenceCounter::fits(bytes), wrong());
  const std::size_t n = bytes.size() / OccurrenceCounter::kSavedBytes;
  std::vector<std::uint64_t> hashes(n);
  std::vector<std::uint32_t> numbers(2 * n);  // counts, clocks
  std::memcpy(hashes.data(), bytes.data(), n * sizeof(std::uint64_t));
  std::memcpy(numbers.data(), bytes.data() + n * sizeof(std::uint64_t), 2 * n * sizeof(std::uint32_t));
  SHOAL_CHECK(std::adjacent_find(hashes.begin(), hashes.end(), std::greater_equal<>()) == hashes.end(),
              "the hashes of waiting keys must ascend");
  const auto is_in_slot = [&](std::uint64_t hash) { return admission_->slots().of(hash) == slot_; };
  make_room(static_cast<std::size_t>(std::ranges::count_if(hashes, is_in_slot)));
  for (std::size_t i = 0; i < n; ++i) {
    if (is_in_slot(hashes[i]) && counter_) {
      counter_->restore(hashes[i], numbers[i], numbers[n + i]);
    }
  }
}

void AdmissionFilter::restore_all(ByteReader& in) {
  if (bloom_) {
    bloom_->restore_all(in);
  } else if (in.take_flag("counter of waiting keys")) {
    const Admission& rule = admission_->rule();
    in.check(rule.kind == Kind::kCount, "counter of waiting keys", "is not of this admission rule");
    counter_ =
        std::make_unique<OccurrenceCounter>(admission_->counter_layout(), slot_, admission_->no_chunks(),
                                            rule.n, rule.within, admission_->max_counted(slot_));
    counter_->restore_all(in, admission_->slots(), slot_);
  }
}

// --- for a save --------------------------------------------------------------------------------------------

void AdmissionFilter::mark(const Layout& numbers) {
  changes_ = std::make_unique<AdmissionSnapshot::Changes>(numbers, slot_);
  if (counter_) {
    changes_->counter_buckets = counter_->table().capacity().buckets;
  }
  watch();
}

void AdmissionFilter::watch() noexcept {
  bool* const lost = changes_ ? &changes_->lost : nullptr;
  if (counter_) {
    counter_->watch(changes_ ? &changes_->candidates : nullptr, lost);
  }
  if (bloom_) {
    bloom_->watch(changes_ ? &changes_->bloom : nullptr, lost);
  }
}

void AdmissionFilter::log(std::span<const std::uint64_t> hashes) {
  if (counter_) {
    counter_->log(hashes);
  } else if (bloom_) {
    bloom_->log(hashes);
  } else if (admission_->rule().kind == Kind::kCount) {  // no key waits yet
    const auto missing = changes_->candidates.missing(hashes);
    changes_->candidates.log(missing, std::vector<const std::byte*>(missing.size()));
  }
}

std::size_t AdmissionFilter::logged_bytes() const noexcept {
  return changes_
             ? changes_->candidates.bytes() + changes_->bloom.changed.bytes() + changes_->bloom.lines.bytes()
             : 0;
}

void AdmissionFilter::copy_to(AdmissionSnapshot& copy) {
  copy.has_waiting_ = counter_ != nullptr;
  if (counter_) {
    copy.waiting_.become_image_of(counter_->table());
  }
  copy.bloom_ = bloom_ && changes_->bloom.had_lines ? &*bloom_ : nullptr;
  if (copy.bloom_ != nullptr) {
    if (changes_->bloom.anew) {
      copy.lines_ = std::move(changes_->bloom.lines);
    } else {
      if (copy.lines_.bytes() < bloom_->lines().bytes()) {
        copy.lines_ = Region(bloom_->lines().bytes());
      }
      std::memcpy(copy.lines_.data(), bloom_->lines().data(), bloom_->lines().bytes());
    }
  }
  copy.changes_ = std::move(changes_);
  watch();
}

void AdmissionFilter::release() noexcept {
  changes_.reset();
  watch();
}

void AdmissionSnapshot::save(std::vector<std::byte>& bytes) {
  bytes.clear();
  if (has_waiting_) {
    OccurrenceCounter::save(waiting_, changes_->candidates, bytes);
  } else if (bloom_ != nullptr) {
    bloom_->save(changes_->bloom, {lines_.data(), lines_.bytes()}, bytes);
  }
  changes_.reset();
}

void AdmissionSnapshot::save_all(ByteWriter& out) {
  const std::unique_ptr<Changes> then = std::move(changes_);
  std::vector<std::byte> bytes;
  if (is_bloom_) {
    out.put(then->bloom.window);
    out.put(static_cast<std::uint8_t>(bloom_ != nullptr ? 1 : 0));
    if (bloom_ != nullptr) {
      bloom_->save(then->bloom, {lines_.data(), lines_.bytes()}, bytes);
      out.put_raw(std::span(bytes).subspan(Bloom::kHead));
    }
    return;
  }
  out.put(static_cast<std::uint8_t>(then->counter_buckets ? 1 : 0));
  if (then->counter_buckets) {
    OccurrenceCounter::save(waiting_, then->candidates, bytes);
    out.put(*then->counter_buckets);
    out.put(std::uint64_t{bytes.size() / OccurrenceCounter::kSavedBytes});
    out.put_raw(bytes);
  }
}

}  // namespace shoal
