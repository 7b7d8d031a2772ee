/* Predictions of an exported model in C: keys, lines of text, rows of a table.
 *
 *     cc examples/predict.c $(shoal-config --cflags --libs) -o predict
 *     ./predict serve/ctr 17 4711             predicts an example with these keys
 *     head day_0.tsv | ./predict serve/ctr    predicts the examples of standard input, lines of the training data; of
 *                                             csv the first line is the header */

#include <shoal/predict.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_BYTES = 1 << 16, MOST_KEYS = 256, MOST_CLASSES = 4096 };

static int fail(const char* what, const shoal_error* error) {
  fprintf(stderr, "%s: %s\n", what, error->message);
  return 1;
}

int main(int count, char** words) {
  if (count < 2) {
    fprintf(stderr, "usage: %s EXPORT [KEY ...]\n", words[0]);
    return 2;
  }
  shoal_error error;
  shoal_predictor* model = NULL;
  if (shoal_open(words[1], NULL, &model, &error) != SHOAL_OK) {
    return fail(words[0], &error);
  }
  shoal_info info;
  shoal_describe(model, &info);
  fprintf(stderr, "version %llu, %s\n", (unsigned long long)info.version, info.kind);

  static double probabilities[MOST_CLASSES];
  shoal_status status = SHOAL_OK;
  if (count > 2) {
    uint64_t keys[MOST_KEYS];
    int64_t offsets[2] = {0, 0};
    for (int i = 2; i < count && offsets[1] < MOST_KEYS; ++i) {
      keys[offsets[1]++] = strtoull(words[i], NULL, 10);
    }
    status = shoal_predict_keys(model, 1, offsets, keys, NULL, probabilities, &error);
    for (size_t k = 0; status == SHOAL_OK && k < info.outputs; ++k) {
      printf("%.9g\n", probabilities[k]);
    }
  } else {
    static char text[2 * LINE_BYTES]; /* a line, after the header of csv, which each call takes */
    size_t header = 0;
    if (strcmp(info.format, "csv") == 0 && fgets(text, LINE_BYTES, stdin) != NULL) {
      header = strlen(text);
    }
    while (status == SHOAL_OK && fgets(text + header, LINE_BYTES, stdin) != NULL) {
      size_t examples = 0;
      shoal_refresh(model, NULL, NULL); /* the newest version, where a directory of exports is served */
      status = shoal_predict_lines(model, text, strlen(text), 1, probabilities, &examples, &error);
      for (size_t k = 0; status == SHOAL_OK && examples == 1 && k < info.outputs; ++k) {
        printf("%.9g%c", probabilities[k], k + 1 < info.outputs ? ' ' : '\n');
      }
    }
  }
  shoal_close(model);
  return status == SHOAL_OK ? 0 : fail("this example cannot be predicted", &error);
}
