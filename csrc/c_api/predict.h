/* shoal/predict.h: predictions of exported models, from C and every language that calls C.
 *
 *     shoal_error error;
 *     shoal_predictor* ctr = NULL;
 *     if (shoal_open("serve/ctr", NULL, &ctr, &error) != SHOAL_OK) {
 *       fprintf(stderr, "%s\n", error.message);
 *     }
 *     const int64_t offsets[] = {0, 3};
 *     const uint64_t keys[] = {17, 4711, 815};
 *     double probability;
 *     shoal_predict_keys(ctr, 1, offsets, keys, NULL, &probability, NULL);
 *     shoal_close(ctr);
 *
 * An export is mapped: all processes of a machine that read it share its pages. Probabilities have the same bits
 * as those of `shoal predict` with that export.
 *
 * Errors. Every function that can fail returns a shoal_status, and describes the failure in *error unless error is
 * NULL. Nothing is written to the results then. No function ends the process or throws.
 *
 * Threads. Any number of threads may use one predictor at the same time; shoal_refresh() swaps the version under
 * them, and each call is answered by one version throughout. shoal_close() comes last, after all calls have
 * returned. Each thread keeps its working memory, which grows to that of its largest request: afterwards requests
 * allocate nothing, but for those of click models, whose network ONNX Runtime computes in the calling thread. A process
 * may fork; a child may go on to predict.
 *
 * Limits. Arrays belong to the caller and are read during the call only. Text is UTF-8 and needs no final zero
 * where its size is passed. */

#ifndef SHOAL_PREDICT_H_
#define SHOAL_PREDICT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SHOAL_API __attribute__((visibility("default")))
#else
#define SHOAL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum shoal_status {
  SHOAL_OK = 0,
  SHOAL_INVALID = 1,    /* an argument or an example cannot be used */
  SHOAL_DAMAGED = 2,    /* a file of the export is missing, damaged, or of another format */
  SHOAL_UNREADABLE = 3, /* the system refuses to read a file */
  SHOAL_NO_MEMORY = 4,
  SHOAL_UNSUPPORTED = 5 /* the function does not apply to the model, or its network cannot be computed */
} shoal_status;

typedef struct shoal_error {
  shoal_status status;
  int64_t example; /* the number of the example at fault, from 0 on; -1: none in particular */
  char message[488];
} shoal_error;

typedef struct shoal_predictor shoal_predictor;

typedef struct shoal_options {
  int skip_checksums; /* 1: do not read every byte of the files first */
  /* The file of ONNX Runtime's library, for click models that were exported with their network as ONNX; NULL:
   * libonnxruntime.so where the system looks for libraries. */
  const char* onnx_runtime;
} shoal_options;

/* Opens an export, or a directory of exports, of which the one with the highest number is used. options may be NULL. */
SHOAL_API shoal_status shoal_open(const char* directory, const shoal_options* options,
                                  shoal_predictor** predictor, shoal_error* error);
SHOAL_API void shoal_close(shoal_predictor* predictor);

/* Looks for a newer version: an export that replaces the current one, one with a higher number, or a delta. If there
 * is one, it becomes the current version, and *is_new is 1. If it cannot be used, that is an error, and the current
 * version stays. Only what is new is read. is_new may be NULL. Call it as often as versions may appear. */
SHOAL_API shoal_status shoal_refresh(shoal_predictor* predictor, int* is_new, shoal_error* error);

typedef struct shoal_info {
  uint64_t version;
  char kind[32]; /* "logistic regression", "factorization machine", "multiclass regression", "click model"; or
                    empty: tables without a model */
  char format[16];   /* of the training data: "criteo", "csv", "libsvm", ...; empty: batches of a program */
  size_t outputs;    /* probabilities of an example: 1, or one for each class; 0: nothing can be predicted */
  int takes_lines;   /* whether shoal_predict_lines applies */
  int takes_columns; /* whether shoal_predict_columns applies */
} shoal_info;

/* The current version. A later call may be answered by a newer one, if another thread refreshes. */
SHOAL_API void shoal_describe(const shoal_predictor* predictor, shoal_info* info);

/* Predicts from keys, as the reader of the training data makes them, interactions among them. Click models need the
 * field of each key: they are asked by the other functions.
 *   offsets  examples + 1 numbers: example i has the features offsets[i] to offsets[i + 1]; begins with 0
 *   keys     one for each feature
 *   values   one for each feature; NULL: each is 1
 *   probabilities  outputs numbers for each example */
SHOAL_API shoal_status shoal_predict_keys(const shoal_predictor* predictor, size_t examples,
                                          const int64_t* offsets, const uint64_t* keys, const float* values,
                                          double* probabilities, shoal_error* error);

/* Predicts from text in the format of the training data, an example in each line, with or without labels. csv has no
 * header here if the training data had none; otherwise its first line is one. The final newline may be missing.
 *   room            examples that fit into probabilities
 *   examples        how many there were; may be NULL. If there were more than room, the status is SHOAL_INVALID */
SHOAL_API shoal_status shoal_predict_lines(const shoal_predictor* predictor, const char* text, size_t size,
                                           size_t room, double* probabilities, size_t* examples,
                                           shoal_error* error);

/* A cell of an example. */
typedef struct shoal_cell {
  const char* column; /* its name, with a final zero */
  const char* text;   /* its text, or NULL: the cell is a number */
  size_t size;        /* bytes of the text */
  double number;
} shoal_cell;

/* Predicts from the named columns of the training data: example i has the cells offsets[i] to offsets[i + 1]. A column
 * without a cell is missing. A column of lists or vectors has a cell for each item. Columns that the model does not
 * know are passed over. */
SHOAL_API shoal_status shoal_predict_columns(const shoal_predictor* predictor, size_t examples,
                                             const int64_t* offsets, const shoal_cell* cells,
                                             double* probabilities, shoal_error* error);

/* Predicts from JSON, {"instances": [...]} as of POST /predict (docs/serving.md). room, examples: as above. */
SHOAL_API shoal_status shoal_predict_json(const shoal_predictor* predictor, const char* body, size_t size,
                                          size_t room, double* probabilities, size_t* examples,
                                          shoal_error* error);

/* Reads rows of a table, for a network of one's own: dim numbers for each key, in the order of the keys. A key without
 * a row reads its initial row. dim is that of shoal_table_dim(), 0: there is no such table. */
SHOAL_API size_t shoal_table_dim(const shoal_predictor* predictor, const char* table);
SHOAL_API shoal_status shoal_pull(const shoal_predictor* predictor, const char* table, size_t count,
                                  const uint64_t* keys, size_t dim, float* rows, shoal_error* error);

/* Keys of text: that of the text in the field with this number, as the readers make it (docs/readers.md); 0 for the
 * number of a named column, which is the key of its name in field 0. */
SHOAL_API uint64_t shoal_key(const char* text, size_t size, uint64_t field);

/* The library's version, as in "0.1.0". */
SHOAL_API const char* shoal_version(void);

#ifdef __cplusplus
}
#endif

#endif /* SHOAL_PREDICT_H_ */
